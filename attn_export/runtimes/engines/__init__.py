"""Runtimes that are Python packages: each file is named as its runtime, with _ for -.

It holds the class, `RUNTIME`, which imports the SDK in methods only.
"""
