"""Judges policies on a simulated node: workload, driver, measures, tables, plots, studies."""
