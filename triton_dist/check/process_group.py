"""torch.distributed under a simulation: the functions that host code around kernels uses, over coroutines.

`with groups:` puts them in torch.distributed's place and takes them back. A collective is a meeting of its ranks' hosts,
except a broadcast, a scatter and a send, after which only the receivers know what the sender has done. Work objects are
done when they are returned, but that of an `irecv`. Any other call that needs a process group is refused by name.
"""

import copy
import functools
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import UnsupportedError
from .messages import Messages, P2POp, Work

NAMES = (
    "P2POp all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier "
    "batch_isend_irecv broadcast broadcast_object_list destroy_process_group gather gather_object get_backend get_global_rank "
    "get_group_rank get_process_group_ranks get_rank get_world_size init_process_group irecv is_initialized isend "
    "monitored_barrier new_group recv recv_object_list reduce reduce_scatter reduce_scatter_tensor scatter "
    "scatter_object_list send send_object_list"
).split()
REFUSED = "_get_default_group", "rendezvous", "_new_process_group_helper"
SIMULATED = [name for name in NAMES if name != "P2POp"]


_TORCH = c10d.__file__.rpartition("distributed")[0].rpartition("distributed")[0]


class NotMember(Exception):
    """The calling rank is not in the group."""


def _of_members(call):
    """A collective call of a rank that is not in the group is no call at all, as in torch."""

    @functools.wraps(call)
    def checked(*args, **kwargs):
        try:
            return call(*args, **kwargs)
        except NotMember:
            warnings.warn(f"torch.distributed.{call.__name__}: this rank is not in the group; nothing is done", stacklevel=2)
            return None

    return checked


class Group:
    """Some ranks. `serial` names it alike on all of them."""

    def __init__(self, serial, ranks):
        self.serial, self.ranks = serial, list(ranks)
        self.calls = {}  # rank -> collective calls so far

    def rank(self):
        return self.ranks.index(Groups.active.simulation.rank)

    def size(self):
        return len(self.ranks)


def _reduced(op, tensors):
    kind = getattr(op, "op", op)
    whole = torch.stack(tensors)
    if kind == dist.ReduceOp.SUM:
        return whole.sum(0).to(whole.dtype)
    if kind == dist.ReduceOp.AVG:
        return (whole.sum(0) / len(tensors)).to(whole.dtype)
    if kind in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        return whole.amax(0) if kind == dist.ReduceOp.MAX else whole.amin(0)
    folds = {
        dist.ReduceOp.PRODUCT: torch.mul,
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }
    if kind not in folds:
        raise ValueError(f"torch.distributed: the checker does not simulate the reduction {op!r}")
    out = tensors[0]
    for tensor in tensors[1:]:
        out = folds[kind](out, tensor)
    return out


class Groups(Messages):
    """The process groups of a simulation."""

    active = None

    def __init__(self, simulation):
        self.simulation = simulation
        self.world = Group(0, range(simulation.world_size))
        self.initialized, self.made = set(), {}

    def __enter__(self):
        places = [(module, name) for module in (dist, c10d) for name in NAMES if hasattr(module, name)]
        places += [(c10d, name) for name in REFUSED if hasattr(c10d, name)]
        self.saved = [(module, name, getattr(module, name)) for module, name in places]
        for module, name in places:
            simulated = P2POp if name == "P2POp" else self._refuse if name in REFUSED else _of_members(getattr(self, name))
            setattr(module, name, simulated)
        Groups.active = self
        return self

    def __exit__(self, *error):
        for module, name, function in self.saved:
            setattr(module, name, function)
        Groups.active = None

    def _refuse(self, *args, **kwargs):
        """In the place of what torch.distributed's own functions ask for first."""
        call, frame = "a collective", sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            if not frame.f_code.co_name.startswith(("_", "wrapper", "<")):
                call = frame.f_code.co_name  # the outermost one
            frame = frame.f_back
        raise UnsupportedError(
            f"rank {self.simulation.rank}: torch.distributed.{call} is not what the checker simulates: it has "
            f"{', '.join(SIMULATED)}. Call these as attributes of torch.distributed: a name that was imported from it before "
            "the checker began is not simulated"
        )

    # -- meetings
    def _group(self, group, call):
        if self.simulation.rank not in self.initialized:
            raise ValueError(f"{call}: the default process group is not initialised: call init_process_group first")
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise NotMember
        return group if isinstance(group, Group) else self.world

    def _meet(self, call, group, value):
        """Every member's value."""
        group = self._group(group, call)
        rank = self.simulation.rank
        number = group.calls[rank] = group.calls.get(rank, 0) + 1
        key = "torch.distributed", group.serial, number
        said = self.simulation.exchange(key, group.ranks, rank, (call, value), lambda: f"in torch.distributed.{call}")
        if len({one for one, _ in said}) > 1:
            calls = ", ".join(f"rank {member}: {one}" for member, (one, _) in zip(group.ranks, said))
            raise RuntimeError(f"the ranks of a group made different calls: {calls}")
        return [one for _, one in said]

    def _from_root(self, call, group, root, value):
        """The root's value, for which everybody waits and the root for nobody."""
        group = self._group(group, call)
        rank, simulation = self.simulation.rank, self.simulation
        number = group.calls[rank] = group.calls.get(rank, 0) + 1
        box = simulation.meetings.setdefault(("torch.distributed", group.serial, number), {})
        if rank == root:
            box["value"] = value
            thread = simulation.host_thread()
            box["clock"] = thread.vc.copy(), thread.wide.copy()
            thread.tick()
            return value
        if "value" not in box:
            where = f"in torch.distributed.{call}: rank {root} has not come"
            simulation.wait_on_host(lambda: "value" in box, lambda: where)
        simulation.host_thread().join(*box["clock"])
        return box["value"]

    # -- life
    def init_process_group(self, *args, **kwargs):
        self.initialized.add(self.simulation.rank)
        self._meet("init_process_group", None, None)

    def destroy_process_group(self, group=None):
        if group is None or group is self.world:
            self.initialized.discard(self.simulation.rank)

    def is_initialized(self):
        return self.simulation.rank in self.initialized

    def new_group(self, ranks=None, *args, **kwargs):
        chosen = tuple(sorted(self.world.ranks if ranks is None else ranks))
        number = self.world.calls.get(self.simulation.rank, 0)
        self._meet("new_group", None, None)
        group = self.made.setdefault((number, chosen), Group((number, chosen), chosen))
        return group if self.simulation.rank in chosen else dist.GroupMember.NON_GROUP_MEMBER

    def get_backend(self, group=None):
        return "gloo"

    def get_rank(self, group=None):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            return -1
        group = self._group(group, "get_rank")
        rank = self.simulation.rank
        return group.ranks.index(rank) if rank in group.ranks else -1

    def get_world_size(self, group=None):
        return -1 if group == dist.GroupMember.NON_GROUP_MEMBER else len(self._group(group, "get_world_size").ranks)

    def get_process_group_ranks(self, group=None):
        return list(self._group(group, "get_process_group_ranks").ranks)

    def get_global_rank(self, group, group_rank):
        return self._group(group, "get_global_rank").ranks[group_rank]

    def get_group_rank(self, group, global_rank):
        return self._group(group, "get_group_rank").ranks.index(global_rank)

    # -- collectives
    def barrier(self, group=None, async_op=False, device_ids=None):
        self._meet("barrier", group, None)
        return Work() if async_op else None

    def monitored_barrier(self, group=None, timeout=None, wait_all_ranks=False):
        self._meet("barrier", group, None)

    def all_gather(self, tensor_list, tensor, group=None, async_op=False):
        said = self._meet("all_gather", group, tensor.clone())
        if len(tensor_list) != len(said):
            raise ValueError(f"torch.distributed.all_gather: {len(tensor_list)} outputs for {len(said)} ranks")
        for out, one in zip(tensor_list, said):
            out.copy_(one)
        return Work() if async_op else None

    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        parts = self._alike("all_gather_into_tensor", group, input_tensor)
        output_tensor.copy_(torch.cat([part.reshape(-1) for part in parts]).view(output_tensor.shape))
        return Work() if async_op else None

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        tensor.copy_(_reduced(op, self._alike("all_reduce", group, tensor)))
        return Work() if async_op else None

    def reduce(self, tensor, dst=None, op=dist.ReduceOp.SUM, group=None, async_op=False, group_dst=None):
        said = self._alike("reduce", group, tensor)
        if self.simulation.rank == self._root(group, dst, group_dst):
            tensor.copy_(_reduced(op, said))
        return Work() if async_op else None

    def reduce_scatter(self, output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        said = self._meet("reduce_scatter", group, [one.clone() for one in input_list])
        me = self.get_rank(group)
        output.copy_(_reduced(op, [lists[me] for lists in said]))
        return Work() if async_op else None

    def reduce_scatter_tensor(self, output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        world = self.get_world_size(group)
        said = self._alike("reduce_scatter_tensor", group, input)
        parts = [one.reshape(-1).chunk(world)[self.get_rank(group)] for one in said]
        output.copy_(_reduced(op, parts).view(output.shape))
        return Work() if async_op else None

    def all_to_all(self, output_tensor_list, input_tensor_list, group=None, async_op=False):
        said = self._meet("all_to_all", group, [one.clone() for one in input_tensor_list])
        me = self.get_rank(group)
        for out, lists in zip(output_tensor_list, said):
            out.copy_(lists[me])
        return Work() if async_op else None

    def all_to_all_single(
        self, output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        world, me = self.get_world_size(group), self.get_rank(group)
        if not input_split_sizes and input.shape[0] % world:
            raise ValueError(f"torch.distributed.all_to_all_single: {input.shape[0]} rows do not split over {world} ranks")
        sizes = input_split_sizes or [input.shape[0] // world] * world
        said = self._meet("all_to_all_single", group, list(input.clone().split(list(sizes))))
        output.copy_(torch.cat([parts[me] for parts in said]).view(output.shape))
        return Work() if async_op else None

    def _root(self, group, root, group_root):
        ranks = self._group(group, "a collective").ranks
        if group_root is not None and not 0 <= group_root < len(ranks):
            raise ValueError(f"rank {self.simulation.rank}: group rank {group_root} is not in a group of {len(ranks)} ranks")
        chosen = ranks[group_root] if group_root is not None else root or 0
        if chosen not in ranks:
            raise ValueError(f"rank {self.simulation.rank}: rank {chosen} is not in the group of ranks {ranks}")
        return chosen

    def _alike(self, call, group, tensor):
        """Every member's tensor, all of one shape and dtype."""
        said = self._meet(call, group, tensor.clone())
        kinds = {(one.shape, one.dtype) for one in said}
        if len(kinds) > 1:
            shown = ", ".join(
                f"rank {rank}: {list(one.shape)} {one.dtype}" for rank, one in zip(self._group(group, call).ranks, said)
            )
            raise ValueError(f"torch.distributed.{call}: the ranks give different tensors: {shown}")
        return said

    def broadcast(self, tensor, src=None, group=None, async_op=False, group_src=None):
        root = self._root(group, src, group_src)
        mine = self.simulation.rank == root
        value = self._from_root("broadcast", group, root, tensor.clone() if mine else None)
        if not mine:
            tensor.copy_(value)
        return Work() if async_op else None

    def scatter(self, tensor, scatter_list=None, src=None, group=None, async_op=False, group_src=None):
        root = self._root(group, src, group_src)
        mine = self.simulation.rank == root
        if mine and len(scatter_list or ()) != self.get_world_size(group):
            raise ValueError(f"torch.distributed.scatter: rank {root} gives {len(scatter_list or ())} tensors")
        parts = [one.clone() for one in scatter_list] if mine else None
        tensor.copy_(self._from_root("scatter", group, root, parts)[self.get_rank(group)])
        return Work() if async_op else None

    def gather(self, tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None):
        said = self._meet("gather", group, tensor.clone())
        if self.simulation.rank == self._root(group, dst, group_dst):
            for out, one in zip(gather_list, said):
                out.copy_(one)
        return Work() if async_op else None

    # -- objects
    def all_gather_object(self, object_list, obj, group=None):
        object_list[:] = [copy.deepcopy(one) for one in self._meet("all_gather_object", group, copy.deepcopy(obj))]

    def gather_object(self, obj, object_gather_list=None, dst=None, group=None, group_dst=None):
        said = self._meet("gather_object", group, copy.deepcopy(obj))
        if self.simulation.rank == self._root(group, dst, group_dst):
            object_gather_list[:] = [copy.deepcopy(one) for one in said]

    def broadcast_object_list(self, object_list, src=None, group=None, device=None, group_src=None):
        root = self._root(group, src, group_src)
        mine = self.simulation.rank == root
        value = self._from_root("broadcast_object_list", group, root, copy.deepcopy(object_list) if mine else None)
        if not mine:
            object_list[:] = copy.deepcopy(value)

    def scatter_object_list(
        self, scatter_object_output_list, scatter_object_input_list=None, src=None, group=None, group_src=None
    ):
        root = self._root(group, src, group_src)
        mine = self.simulation.rank == root
        value = copy.deepcopy(scatter_object_input_list) if mine else None
        mine = self._from_root("scatter_object_list", group, root, value)[self.get_rank(group)]
        scatter_object_output_list[0] = copy.deepcopy(mine)
