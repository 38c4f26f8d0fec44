"""What happens to a request: it is read, understood, and sent to the service whose description is nearest.

Pure modules (``wire``, ``kserve``, ``grpc_message``, ``policy``, ``decision``, ``request``, ``store``) take values and
return values; ``extproc``, ``app`` and ``explain`` do the input and output.
"""
