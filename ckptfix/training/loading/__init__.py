"""Loads of whatever is on disk into what is in memory: all of it, or nothing, with a report.

``load_state`` is the entry for a whole run and for one model, ``delegated`` for runs that
accelerate must load. ``targets`` are the objects of a run, and ``assignment`` decides which of them
gets which entry of the folder. A ``draft`` collects the plan: ``models`` and ``states`` (random
generators, too) with ``moments`` fill it, ``checking`` refuses what does not suit. ``commit`` makes
all ranks agree and does it, or undoes it. ``load_report`` is what the caller gets. To restore one
more thing: a ``Part`` in ``load_report``, an action in ``draft``, its place in the order of
``commit``.
"""
