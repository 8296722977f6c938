"""torch.distributed's messages from one rank to another, under a simulation: `send`, `recv`, their non-blocking, batched and
object forms.
"""

import copy


class Work:
    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True


class Receipt(Work):
    """Of an `irecv`: `wait` receives."""

    def __init__(self, receive):
        self.receive, self.source = receive, None

    def wait(self, timeout=None):
        if self.source is None:
            self.source = self.receive()
        return True

    def is_completed(self):
        return self.source is not None


class P2POp:
    """One of the operations of a `batch_isend_irecv`."""

    def __init__(self, op, tensor, peer=None, group=None, tag=0, group_peer=None):
        self.op, self.arguments = op, (tensor, peer, group, tag, group_peer)


class Messages:
    """What Groups has of them."""

    def isend(self, tensor, dst=None, group=None, tag=0, group_dst=None):
        self.send(tensor, dst, group, tag, group_dst)
        return Work()

    def irecv(self, tensor, src=None, group=None, tag=0, group_src=None):
        return Receipt(lambda: self.recv(tensor, src, group, tag, group_src))

    def batch_isend_irecv(self, p2p_op_list):
        return [one.op(*one.arguments) for one in p2p_op_list]

    def send_object_list(self, object_list, dst=None, group=None, device=None, group_dst=None, use_batch=False):
        for position, one in enumerate(object_list):
            self._send(copy.deepcopy(one), dst, group, ("object", position), group_dst)

    def recv_object_list(self, object_list, src=None, group=None, device=None, group_src=None, use_batch=False):
        for position in range(len(object_list)):
            source, object_list[position] = self._recv(src, group, ("object", position), group_src)
        return source

    def _channel(self, source, target, tag):
        return self.simulation.meetings.setdefault(("send", source, target, tag), [])

    def send(self, tensor, dst=None, group=None, tag=0, group_dst=None):
        self._send(tensor.clone(), dst, group, tag, group_dst)

    def recv(self, tensor, src=None, group=None, tag=0, group_src=None):
        source, value = self._recv(src, group, tag, group_src)
        tensor.copy_(value)
        return source

    def _send(self, value, dst, group, tag, group_dst):
        self._group(group, "send")
        thread = self.simulation.host_thread()
        target = self._root(group, dst, group_dst)
        self._channel(self.simulation.rank, target, tag).append((value, thread.vc.copy(), thread.wide.copy()))
        thread.tick()

    def _recv(self, src, group, tag, group_src):
        """(source, value); from anybody when no source is given."""
        members = self._group(group, "recv").ranks
        anybody = src is None and group_src is None
        sources = members if anybody else [self._root(group, src, group_src)]
        channels = {source: self._channel(source, self.simulation.rank, tag) for source in sources}
        if not any(channels.values()):
            whom = "any rank" if anybody else f"rank {sources[0]}"
            self.simulation.wait_on_host(lambda: any(channels.values()), lambda: f"in torch.distributed.recv from {whom}")
        source = next(source for source, channel in channels.items() if channel)
        value, vc, wide = channels[source].pop(0)
        self.simulation.host_thread().join(vc, wide)
        return source, value
