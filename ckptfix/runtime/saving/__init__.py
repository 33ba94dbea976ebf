"""Saves that are whole or absent, and which of them is loaded.

``state`` and ``model`` stand in front of ``save_state`` and ``save_model``, ``resuming`` in front of ``load_state``.
``staging`` is the folder on its way (``checkpoint.staged`` names it), ``recording`` what its manifest says,
``rotation`` what goes.
"""
