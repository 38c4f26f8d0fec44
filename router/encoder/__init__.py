"""Texts and pictures to vectors of one space, in a process of its own.

Nothing is imported here: who needs only the client, or only a fingerprint, does not pay for a model runtime.
"""
