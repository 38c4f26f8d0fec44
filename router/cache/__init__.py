"""The modality-fingerprint cache: what was answered before is answered again, and what was never seen harms nobody.

A library: it knows nothing of Envoy. README.md says how its parts fit together.
"""
