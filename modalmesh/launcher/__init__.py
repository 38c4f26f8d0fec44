"""One node's mesh as a set of processes: started in order, watched, restarted, stopped.

Why this exists: `modalmesh run` and `modalmesh up` are the first things a newcomer meets; on a production node systemd
or Kubernetes starts the same commands instead.
"""
