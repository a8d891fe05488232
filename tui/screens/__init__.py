"""Screens and dialogs of the application: which page shows what, and what keys do."""
