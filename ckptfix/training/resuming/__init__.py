"""Resume: ``guarded_load`` guards ``load_state`` and finds the newest complete checkpoint.
``run_state`` is the file of a rank that lets a run go on bit for bit; ``positions`` follows its
data loaders, of which ``saved_positions`` are kept, and ``worker_states`` their workers.
``generators`` reads, sets and compares the states of random generators.
"""
