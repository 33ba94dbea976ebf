"""Resume: ``guarded_load`` guards ``load_state`` and finds the newest complete checkpoint. ``run_state`` is the file of
a rank that lets a run go on bit for bit; ``positions`` are those of its data loaders, ``worker_states`` those of their
workers. ``generators`` reads and sets the states of random number generators, and compares states.
"""
