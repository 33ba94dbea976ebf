"""Saves that are whole or absent, and which of them is loaded.

``state`` and ``model`` stand in front of ``save_state`` and ``save_model``, ``resuming`` in front of ``load_state``.
``meeting`` finds out who takes part; ``staging`` is the folder on its way, ``recording`` what its manifest says,
``rotation`` and ``leftovers`` what goes.
"""
