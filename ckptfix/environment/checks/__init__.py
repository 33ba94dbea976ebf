"""Checks, one module per subject. Each is a pure function of ``Facts`` that yields advice on the
module's topics.
"""
