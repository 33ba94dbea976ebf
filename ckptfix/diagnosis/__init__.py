"""From a checkpoint folder to findings: the catalogue of damage, and what ``check`` looks at. Free of torch."""
