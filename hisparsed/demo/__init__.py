"""The demo: two real nodes on this machine, a recorded trace, the policy on and off."""
