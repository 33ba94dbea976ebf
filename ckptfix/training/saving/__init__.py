"""Saves that are complete or absent.

``save_state`` guards ``save_state`` and ``save_model``; ``meeting`` brings all processes together; ``staged_saves`` is
the folder on its way and its exchange with the old one; ``recording`` is what the manifest of a save says. To record
one more thing: a field of ``checkpoint.manifest`` that ``recording.make_manifest`` fills.
"""
