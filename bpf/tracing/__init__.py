"""For a person who asks what the kernel is doing right now; driven by Debian's ``bcc``, never in the data path."""
