"""Marks, preamble, sweep and the parser of its report: how a turn's processes are known."""
