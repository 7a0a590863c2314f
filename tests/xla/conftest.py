"For all tests on XLA."
import os

# Tiny models are computed in no time and compiled for minutes: LLVM need not optimise them (60 % less processor time).
# What is compiled, how often, and what would fall back to the host stays the same
os.environ['XLA_FLAGS'] = '--xla_backend_optimization_level=0'
