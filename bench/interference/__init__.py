"""How much prompts that arrive disturb streams that are running: split workers against colocated ones.

The load generator speaks gRPC to the decode service, as a gateway does, and takes the time at which each
token reaches it. It does not go through the gateway. On two cores everything beside the workers takes time
from the workers: a gateway with its event log and a client behind it would be two or three more processes
on the cores that are compared, and their share of a gap would be the same in every arrangement, which makes
the arrangements look more alike than they are. So these figures are the workers' own, transport included;
what a gateway adds to a token is not in them. The generator's own share (its CPU, how late it ran) is
measured beside them and printed, so that nobody has to believe that it is small.
"""
