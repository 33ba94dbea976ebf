"""Folder that a proof puts first in PYTHONPATH, so that every python of the run imports
``sitecustomize`` from it.
"""
