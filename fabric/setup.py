"""`SetupVerbs`: set up models, optimizers and loaders. All ranks must call every verb of this class."""

from __future__ import annotations

import os
import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

from torch.nn import Module
from torch.utils.data import DataLoader
from typing_extensions import TypeVarTuple, Unpack

from fabric.checks import (
    check_comparable,
    check_forward_module,
    check_module,
    check_not_set_up,
    check_optimizers,
    check_owned,
    empty_module_error,
    warn_of_batch_norm,
    warn_of_workers,
)
from fabric.core.arguments import explains_arguments
from fabric.core.backward_listeners import optimizer_owners, parameters_of, setups
from fabric.core.compile import recompile
from fabric.core.tree import map_tree
from fabric.data.loader import _FabricDataLoader
from fabric.facts import RankFacts
from fabric.utilities.init import (
    MODEL_NAME,
    RANK_LOCAL,
    describe_module,
    has_meta_parameters,
    name_of,
    remember_owner,
)
from fabric.utilities.seed import RngState
from fabric.wrappers import _FabricContainer, _FabricModule, _FabricOptimizer, unwrap

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch.optim import Optimizer

    from fabric.data.epochs import BegunEpochs
    from fabric.strategies.free import StepCheck

# For type checkers a model and an optimizer that were set up are of the user's own classes.
M = TypeVar("M", bound="Module")
O1 = TypeVar("O1", bound="Optimizer")
O2 = TypeVar("O2", bound="Optimizer")
S = TypeVar("S")
Rest = TypeVarTuple("Rest")


class SetupOptions(TypedDict, total=False):
    """Keyword arguments of `setup`, for its typed signatures."""

    move_to_device: bool
    replica_check: bool
    _reapply_compile: bool
    rank_local: Collection[str]


class LoaderOptions(TypedDict, total=False):
    """Keyword arguments for sharding loaders, for type checkers."""

    use_distributed_sampler: bool
    move_to_device: bool
    uneven: str | None
    shard_iterable: bool | None


@explains_arguments
class SetupVerbs(RankFacts):
    """setup, setup_module, setup_optimizers, setup_dataloaders, whole, rng_state."""

    _models = 0
    """Number of models that were set up."""
    _begun_epochs: BegunEpochs
    """Epochs of training since the last model was set up."""
    _step_check: StepCheck | None = None
    _backward_checked = False
    """Whether a backward has checked for models and loaders that were not set up."""

    @overload
    def setup(self, module: M, *, scheduler: None = None, **options: Unpack[SetupOptions]) -> M: ...
    @overload
    def setup(
        self,
        module: M,
        optimizer: O1,
        /,
        *optimizers: Unpack[Rest],
        scheduler: None = None,
        **options: Unpack[SetupOptions],
    ) -> tuple[M, O1, Unpack[Rest]]: ...
    @overload
    def setup(
        self, module: M, /, *optimizers: Unpack[Rest], scheduler: S, **options: Unpack[SetupOptions]
    ) -> tuple[M, Unpack[Rest], S]: ...
    def setup(  # type: ignore[misc]  # mypy does not see that *Any takes any tuple
        self,
        module: Module,
        *optimizers: Any,
        scheduler: Any | None = None,
        move_to_device: bool = True,
        replica_check: bool = True,
        _reapply_compile: bool = True,
        rank_local: Collection[str] = (),
    ) -> Any:
        """Set up a model and its optimizers: device, precision, gradients. All ranks must call this.

        Args:
            module: Your model, compiled or not; changed in place (device, dtype).
            optimizers: Optimizers of this model's parameters.
            scheduler: Returned unchanged; schedulers need no setup.
            move_to_device: False leaves device placement to you.
            replica_check: False: the ranks may hold different values of this model and these optimizers.
            rank_local: Names of buffers, or patterns (fnmatch) of names, that each rank keeps for itself. All
                other buffers are compared here, and have rank zero's values after each training backward.

        Returns:
            The model, or (model, *optimizers), or (model, *optimizers, scheduler). For type checkers they
            have your own classes; `assert isinstance(model, _FabricModule)` adds `mark_forward_method`.

        Raises:
            ConfigurationError: Something is set up already, or an optimizer holds parameters of other models;
                `rank_local` matches no buffer.
            ArgumentTypeError: Not a module, not an optimizer.
            UsageError: The model contains DDP or FSDP1; its buffers differ between ranks.
        """
        if not self._launched:
            self._require_launch("setup()")
        self._models += 1
        self._begun_epochs.models = self._models
        if optimizers:
            check_optimizers(optimizers, "fabric.setup")
        module, original = check_module(module, "fabric.setup", self._strategy)
        if rank_local or RANK_LOCAL in vars(original):  # drops the marks of an earlier setup
            from fabric.strategies.buffers import mark_rank_local

            mark_rank_local(original, rank_local)
        wrapped, inner_optimizers, scheduler = self._wrap(
            original, module, list(optimizers), scheduler, move_to_device, _reapply_compile
        )
        if added := self._strategy.hooks["added"]:
            names = self._rank_local_names(original)
            for call in added:
                call(wrapped, inner_optimizers, replicated=replica_check, rank_local=names)
        optimizer_owners.update(dict.fromkeys(inner_optimizers, (weakref.ref(self._strategy), next(setups))))
        views = [_FabricOptimizer(o, self._strategy, self._callbacks) for o in inner_optimizers]
        if self._callbacks:
            self.call("on_after_setup", fabric=self, module=wrapped)
        rest = [] if scheduler is None else [scheduler]
        return (wrapped, *views, *rest) if views or rest else wrapped

    def setup_module(
        self,
        module: M,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
        *,
        replica_check: bool = True,
        rank_local: Collection[str] = (),
    ) -> M:
        """Set up a model without optimizers. All ranks must call this. Arguments and errors as for `setup`.

        Returns:
            The model.
        """
        self._require_launch("setup_module()")
        check_not_set_up((module,), Module, "fabric.setup_module")
        return self.setup(
            module,
            move_to_device=move_to_device,
            replica_check=replica_check,
            _reapply_compile=_reapply_compile,
            rank_local=rank_local,
        )

    @overload
    def setup_optimizers(self, optimizer: O1, /, *, replica_check: bool = True) -> O1: ...

    @overload
    def setup_optimizers(
        self, first: O1, second: O2, /, *optimizers: Unpack[Rest], replica_check: bool = True
    ) -> tuple[O1, O2, Unpack[Rest]]: ...

    def setup_optimizers(self, *optimizers: Any, replica_check: bool = True) -> Any:  # type: ignore[misc]
        """Set up optimizers whose models are set up by separate calls. All ranks must call this.

        Parameters that belong to no model get rank zero's values, and each backward averages their gradients.

        Args:
            optimizers: At least one.
            replica_check: As for `setup`.

        Returns:
            The optimizer, or a tuple of several.

        Raises:
            ConfigurationError: There is no optimizer, or one is set up already.
            ArgumentTypeError: Not an optimizer.
        """
        self._require_launch("setup_optimizers()")
        check_optimizers(optimizers, "fabric.setup_optimizers")
        for optimizer in optimizers:
            self._strategy.layout.remap_parameters(optimizer)
            self._strategy.layout.add_free_parameters(parameters_of(optimizer), optimizer)
        inner_optimizers = [self._strategy.setup_optimizer(o) for o in optimizers]
        for added in self._strategy.hooks["added"]:
            added(None, inner_optimizers, replicated=replica_check, rank_local=())
        optimizer_owners.update(dict.fromkeys(inner_optimizers, (weakref.ref(self._strategy), next(setups))))
        views = [_FabricOptimizer(o, self._strategy, self._callbacks) for o in inner_optimizers]
        return views[0] if len(views) == 1 else tuple(views)

    @overload
    def setup_dataloaders(
        self, dataloader: DataLoader[Any], /, **options: Unpack[LoaderOptions]
    ) -> _FabricDataLoader: ...

    @overload
    def setup_dataloaders(
        self,
        first: DataLoader[Any],
        second: DataLoader[Any],
        /,
        *dataloaders: DataLoader[Any],
        **options: Unpack[LoaderOptions],
    ) -> list[_FabricDataLoader]: ...

    def setup_dataloaders(
        self,
        *dataloaders: DataLoader[Any],
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
        uneven: str | None = None,
        shard_iterable: bool | None = None,
    ) -> Any:
        """Shard loaders over ranks and move their batches to the device. All ranks must call this.

        With w ranks and batch_size b, global batch k holds positions [k*w*b, (k+1)*w*b) of the epoch's order.
        That order is a function of seed, epoch and sampler alone. Rank r takes every w-th position from the
        r-th on. The loader counts epochs; its `state_dict()` and `load_state_dict()` save and restore the
        position.

        Args:
            dataloaders: Your loaders; they are copied shallowly and left unchanged.
            use_distributed_sampler: False leaves the order and the sharding to you.
            move_to_device: False leaves batches where the loader puts them.
            uneven: What happens when samples do not divide by ranks: "pad", "exact", "drop", "error". None:
                "exact" for loaders in dataset order (evaluation) and iterable datasets, "pad" for all others,
                and one warning after an epoch of training on samples that do not divide.
                If you shard the data yourself, ranks with different numbers of batches stop together under
                "drop" and raise under "error".
            shard_iterable: False: iterable datasets shard themselves by rank and worker. With `uneven=None`
                ranks then stop together while gradients are enabled, at one message per batch. True: all
                ranks read the same stream, and Fabric shards it. None: ranks compare their first samples in
                the first iteration, which all ranks must begin. Equal samples mean True, disjoint ones False
                (with one warning); if only some are equal, all ranks raise an error.

        Returns:
            The loader, or a list of several.

        Raises:
            ConfigurationError: No loader, one set up already, or unknown `uneven`; the datasets of the ranks
                differ in length, indices or lists of files.
            ArgumentTypeError: Not a DataLoader.
        """
        self._require_launch("setup_dataloaders()")
        check_not_set_up(dataloaders, DataLoader, "fabric.setup_dataloaders")
        if self._strategy.topology.world_size > 1:
            from fabric.data.fingerprints import check_same_data, fingerprint

            local = [fingerprint(loader) if use_distributed_sampler else None for loader in dataloaders]
            label = f"setup_dataloaders of {len(dataloaders)} loaders"
            check_same_data(self._strategy.all_gather_object(local, label=label))
            warn_of_workers(dataloaders, self._strategy.topology.local_world_size)
        wrapped = [
            self._wrap_loader(loader, use_distributed_sampler, move_to_device, uneven, shard_iterable)
            for loader in dataloaders
        ]
        return wrapped[0] if len(wrapped) == 1 else wrapped

    _setup_dataloader = setup_dataloaders

    @contextmanager
    def whole(self, model: _FabricModule) -> Iterator[Module | None]:
        """Context with the unsharded module on rank zero, and None on other ranks. All ranks must call this.

        For work of one rank: evaluation, `generate`, an export. Strategies that do not shard models yield
        your module itself. Others yield a copy on rank zero's device, which must have memory for it. Forward
        runs without autocast. Changes to a copy are lost afterwards.

            with fabric.whole(model) as plain:
                if plain is not None:
                    print(plain.eval()(batch))

        Args:
            model: The model that `setup` returned.

        Raises:
            UsageError: `model` is not set up.
        """
        self._require_launch("whole()")
        check_forward_module(model, "fabric.whole")
        strategy = self._strategy
        if strategy.topology.world_size > 1:
            strategy.check_barrier("whole", f"of {name_of(model.module)}")
        plain = strategy.layout.plain_module(model.module, self.is_global_zero, self.device)
        modes = [] if plain is None else [(part, part.training) for part in plain.modules()]
        try:
            yield plain
        finally:
            for part, training in modes:
                part.training = training

    def check_replicas(self, *objects: Any) -> None:
        """Compare values that must be equal on all ranks, now. All ranks must call this.

        Args:
            objects: Models, optimizers, tensors, and nestings of them; they need no setup. Without any: all
                models and optimizers that were set up.

        Raises:
            ReplicasDivergedError: They differ; on all ranks.
            ArgumentTypeError: An object has no tensor to compare.
        """
        self._require_launch("check_replicas()")
        check_comparable(objects)
        if (check := self._strategy.find_part("replica check")) is not None:
            only = map_tree(unwrap, list(objects)) if objects else None
            check.compare("check_replicas", buffers=None, only=only)

    def rng_state(self) -> RngState:
        """Random states of all ranks, to save: `fabric.save(path, {"rng": fabric.rng_state()})`.

        After a load into the same entry of `state`, python, numpy and torch continue their random streams.
        All ranks must make the save and the load. Workers need no entry: their random numbers are a function
        of the batch.
        """
        self._require_launch("rng_state()")
        exchange = partial(self._strategy.all_gather_object, label="rng_state")
        topology = self._strategy.topology
        return RngState(topology.rank, exchange if topology.world_size > 1 else None)

    def _rank_local_names(self, module: Module) -> Collection[str]:
        if self._strategy.topology.world_size == 1:
            return ()
        from fabric.strategies.buffers import rank_local_names

        return rank_local_names(module)

    def _wrap(
        self,
        original: Module,
        module: Any,
        optimizers: list[Any],
        scheduler: Any,
        move_to_device: bool,
        reapply_compile: bool,
    ) -> tuple[_FabricModule, list[Any], Any]:
        for optimizer in optimizers if self._strategy.modules else ():
            # The optimizer may hold parameters of a model that was set up earlier.
            self._strategy.layout.remap_parameters(optimizer)
        if optimizers:
            check_owned(tuple(optimizers), [original, *self._strategy.modules], "fabric.setup")
        empty = has_meta_parameters(original)
        if empty and self._strategy.layout.traits.initialises_meta:
            move_to_device = False  # the layout creates the values on the device
        if move_to_device and empty:
            raise empty_module_error(original)
        precision = self._strategy.precision
        inner = precision.convert_module(original)
        inner.__dict__[MODEL_NAME] = f"model {self._models - 1} ({type(inner).__name__})"
        if optimizers and precision.replaces_parameters:
            check_owned(tuple(optimizers), [inner, *self._strategy.modules], "fabric.setup")
        if move_to_device:
            self._strategy.place_module(inner)
        if self._strategy.topology.world_size > 1:
            self._strategy.check_barrier("setup", describe_module(inner))
            from fabric.strategies.buffers import check_buffers
            from fabric.strategies.free import StepCheck

            check_buffers(inner, partial(self._strategy.all_gather_object, label="setup"))
            self._step_check = self._step_check or StepCheck(self._strategy)
            if self._strategy.data_rank[1] > 1:
                warn_of_batch_norm(inner, self.device)
        if optimizers:
            forward_module, optimizers, scheduler = self._strategy.setup_module_and_optimizers(
                inner, optimizers, scheduler
            )
        else:
            forward_module = self._strategy.setup_module(inner)
        if module is not original and reapply_compile:  # it is compiled
            forward_module = recompile(forward_module, like=module)
        self._strategy.modules[inner] = None
        if self._strategy.topology.world_size > 1:
            remember_owner(inner)
        kind = _FabricContainer if hasattr(type(inner), "__getitem__") else _FabricModule
        return kind(forward_module, self._strategy, inner), optimizers, scheduler

    def _wrap_loader(
        self, given: Any, shard: bool, move_to_device: bool, uneven: str | None, iterable: bool | None
    ) -> _FabricDataLoader:
        from fabric.data.rules import Shard
        from fabric.data.sharding import shard_loader

        seed = int(os.environ.get("FABRIC_GLOBAL_SEED", "0"))
        # One order on all ranks, even if their seeds differ, or one of them has looked at a batch.
        seed, epoch = self._strategy.broadcast((seed, self._begun_epochs.next_of(given)))
        replica = self._strategy.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        share = Shard(replica["rank"], replica["num_replicas"]) if shard else Shard(self._data_rank, 1)
        topology = self._strategy.topology
        adapter = shard_loader(
            given, share, seed, uneven, iterable, topology.world_size, use_distributed_sampler=shard
        )
        loader = self._strategy.process_dataloader(adapter.loader)
        rank_group = lockstep = None
        if topology.world_size > 1:
            from fabric.data.rank_consistency import RankGroup

            exchange = partial(self._strategy.all_gather_object, label="loader")
            flags = partial(self._strategy.reduce_boolean_decision, label="loader")
            rank_group = RankGroup(topology.rank, topology.world_size, exchange, flags)
            lockstep = uneven or ("train" if shard else None)
        return _FabricDataLoader(
            loader,
            self.device if move_to_device else None,
            move=self._strategy.batch_to_device,
            user_loader=given,
            adapter=adapter,
            lockstep=lockstep,
            rank_group=rank_group,
            parts=self._strategy.parts_with("epoch_ended") if shard else (),
            chose_uneven=uneven is not None,
            begun=self._begun_epochs,
            epoch=epoch,
        )
