"""Serving: an event simulation of one instance under load."""
