"""Models split over several devices: safe transfers, the probe of peer copies, and reloads on a device map.

Safe transfers, from the bottom: ``pairs`` (which devices there are), ``pipeline`` (the order of a copy by way of the
host), ``staging`` (such copies with torch), ``counting``, ``routing`` (which way a copy goes), ``overriding`` (the one
place in torch that all copies pass) and ``fallback`` (for a torch without it), ``transfers`` (who asked for what),
``dispatching`` with ``current`` and ``tying`` (models), ``patching`` (models that others dispatch).
"""
