"""The demo: a real node on this machine, a real trace, the policy on and then off."""
