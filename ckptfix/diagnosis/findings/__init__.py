"""Kinds of damage: one class a kind, with a stable code, a severity and its numbers.

A finding is a value. ``str(finding)`` is the sentence a person reads; ``advice`` is what to do
about it.
"""
