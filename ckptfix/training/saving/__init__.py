"""Saves that are whole or absent, and which of them is loaded.

``state`` and ``model`` stand in front of ``save_state`` and ``save_model``, ``resuming`` in front of ``load_state``.
``meeting`` brings all processes together; ``staging`` is the folder on its way (``checkpoint.staged`` names it),
``replacing`` what of the target goes, ``recording`` what its manifest says, ``rotation`` which older checkpoints go.
"""
