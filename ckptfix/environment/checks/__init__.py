"""The checks, one module a subject. Each is a pure function of ``Facts`` that yields advice on the topics beside it."""
