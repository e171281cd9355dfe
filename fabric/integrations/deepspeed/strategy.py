"""`DeepSpeedStrategy`: DeepSpeed's engine for the same loop."""

from __future__ import annotations

import inspect
import logging
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from fabric.checkpoint import state as states
from fabric.checkpoint.same_content import compare_content, content_of
from fabric.core.errors import ConfigurationError, UsageError
from fabric.integrations.deepspeed import checkpoints
from fabric.integrations.deepspeed.layout import DeepSpeedLayout
from fabric.integrations.deepspeed.package import environment, forget_groups, load_deepspeed
from fabric.integrations.deepspeed.precision import DeepSpeedPrecision
from fabric.integrations.deepspeed.settings import complete, get, joined
from fabric.precision._torch import COUNTED_STEP, STEPPED
from fabric.precision.dtypes import CastTo
from fabric.strategies.buffers import shared_buffers
from fabric.strategies.ddp.strategy import DDPStrategy
from fabric.strategies.tensor_sync import broadcast_from_zero
from fabric.wrappers import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.accelerators.accelerator import Accelerator
    from fabric.checkpoint.background.pending import PendingSave
    from fabric.core.types import Filter, PathLike
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from fabric.precision.precision import Precision
    from fabric.strategies.strategy import Plan


class DeepSpeedStrategy(DDPStrategy):
    """ZeRO stages 1, 2 and 3 with DeepSpeed. Each model that is set up with its optimizer is an engine.

    The loop is the same as for all strategies. Differences: `.grad` is not averaged over ranks (in stages 2
    and 3 it is None), so clip with `fabric.clip_gradients`. All backwards up to a step add up, with or
    without `no_backward_sync`, and `zero_grad()` must follow each step. A step changes all parameters, also
    those without gradients (by momentum and weight decay). All ranks make each forward and backward.

    Args:
        accelerator: As in `Strategy`.
        zero_optimization: Must be True: without it DeepSpeed is DDP.
        stage: 1 (optimizer states are sharded over ranks), 2 (and gradients), 3 (and parameters).
        remote_device: Where `fabric.init_module` puts parameters under stage 3: "cpu", "nvme".
        offload_optimizer: Whether master weights and optimizer states are in host memory.
        offload_parameters: Whether parameters are in host memory (stage 3).
        config: DeepSpeed's own configuration, a dictionary or the path of a JSON file; keywords may extend,
            but not contradict it. None: the file that the variable FABRIC_DEEPSPEED_CONFIG_PATH names.
        logging_level: Level of DeepSpeed's messages, as in `logging`.
        load_full_weights: Ignored: each load detects the kind of a checkpoint.
        exclude_frozen_parameters: Whether DeepSpeed's directories omit frozen parameters.
        parallel_devices: As in `ParallelStrategy`.
        cluster_environment: As in `ParallelStrategy`.
        precision: As in `Strategy`.
        process_group_backend: As in `DDPStrategy`.
        timeout: As in `DDPStrategy`.
        offload_params_device: "cpu" or "nvme".
        nvme_path: A directory on a fast disk, for "nvme".
        params_buffer_count: Number of buffers for parameters between host and disk.
        params_buffer_size: Elements of each buffer.
        max_in_cpu: Elements of parameters that stay in host memory with "nvme".
        offload_optimizer_device: "cpu" or "nvme".
        optimizer_buffer_count: Number of buffers for optimizer states between host and disk.
        block_size: Bytes of a read from a disk.
        queue_depth: Number of reads at a time.
        single_submit: Whether reads are submitted one by one.
        overlap_events: Whether reads are submitted while others are pending.
        thread_count: Number of threads for reads.
        pin_memory: Whether offloaded memory is pinned.
        sub_group_size: Elements of parameters that are stepped at a time.
        contiguous_gradients: As in DeepSpeed.
        overlap_comm: Whether gradients are reduced during the backward; not under stage 1.
        allgather_partitions: As in DeepSpeed.
        reduce_scatter: As in DeepSpeed.
        allgather_bucket_size: Elements of a message.
        reduce_bucket_size: Elements of a message.
        zero_allow_untested_optimizer: As in DeepSpeed.
        logging_batch_size_per_gpu: The batch size in DeepSpeed's messages.
        loss_scale: A fixed scale in float16; 0: dynamic.
        initial_scale_power: The dynamic scale starts with 2 to this power.
        loss_scale_window: Steps without overflow until it is doubled.
        hysteresis: Overflows until it is halved.
        min_loss_scale: Its minimum.
        partition_activations: As in DeepSpeed's activation checkpoints.
        cpu_checkpointing: As `partition_activations`.
        contiguous_memory_optimization: As `partition_activations`.
        synchronize_checkpoint_boundary: As `partition_activations`.

    Raises:
        ConfigurationError: Keywords and `config` contradict each other, or have no stage.
        ArgumentTypeError: `config` is neither a dictionary nor a path.
        MissingExtraError: DeepSpeed is not installed.
    """

    layout: DeepSpeedLayout
    _restore: Any = None
    state_dict_type = "deepspeed"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        zero_optimization: bool = True,
        stage: int = 2,
        remote_device: str | None = None,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        offload_params_device: str = "cpu",
        nvme_path: str = "/local_nvme",
        params_buffer_count: int = 5,
        params_buffer_size: int = 100_000_000,
        max_in_cpu: int = 1_000_000_000,
        offload_optimizer_device: str = "cpu",
        optimizer_buffer_count: int = 4,
        block_size: int = 1048576,
        queue_depth: int = 8,
        single_submit: bool = False,
        overlap_events: bool = True,
        thread_count: int = 1,
        pin_memory: bool = False,
        sub_group_size: int = 1_000_000_000_000,
        contiguous_gradients: bool = True,
        overlap_comm: bool = True,
        allgather_partitions: bool = True,
        reduce_scatter: bool = True,
        allgather_bucket_size: int = 200_000_000,
        reduce_bucket_size: int = 200_000_000,
        zero_allow_untested_optimizer: bool = True,
        logging_batch_size_per_gpu: int | None = None,
        config: str | Path | dict[str, Any] | None = None,
        logging_level: int = logging.WARN,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        loss_scale: float = 0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        min_loss_scale: int = 1,
        partition_activations: bool = False,
        cpu_checkpointing: bool = False,
        contiguous_memory_optimization: bool = False,
        synchronize_checkpoint_boundary: bool = False,
        load_full_weights: bool = False,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(seconds=1800),
        exclude_frozen_parameters: bool = False,
    ) -> None:
        given = dict(locals())
        load_deepspeed()
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        if not zero_optimization:
            raise ConfigurationError(
                "DeepSpeed without zero_optimization splits nothing: that is DDP. Write "
                'strategy="ddp", or stage=1, 2 or 3.'
            )
        parameters = inspect.signature(DeepSpeedStrategy.__init__).parameters
        self._keywords = {name: given[name] for name in parameters if name != "self"}
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        self.config = joined(self._keywords, defaults, config)
        self._exclude_frozen, self._logging_level = exclude_frozen_parameters, logging_level
        self.layout = DeepSpeedLayout(get(self.config, "zero_optimization.stage"))

    @property
    def zero_stage_3(self) -> bool:
        """Whether parameters are sharded."""
        return self.layout.stage == 3

    def bind(self, plan: Plan) -> None:
        """Complete the composition by `plan`, with a `DeepSpeedPrecision`: the engine sets the dtypes of
        parameters.
        """
        super().bind(replace(plan, precision=DeepSpeedPrecision(plan.precision.precision)))

    def setup_environment(self) -> None:
        """Set up device and process group, and initialise DeepSpeed. All ranks must call this.

        Raises:
            ConfigurationError: DeepSpeed does not support float16 on the devices.
        """
        super().setup_environment()
        deepspeed = load_deepspeed(self.root_device.type)
        deepspeed.logger.setLevel(self._logging_level)
        forget_groups()
        # DeepSpeed reads LOCAL_RANK at any time.
        self._restore = environment(LOCAL_RANK=str(self.topology.local_rank))
        self._restore.__enter__()
        deepspeed.init_distributed(dist_init_required=False)
        if self._precision.policy.loss_scale and not deepspeed.get_accelerator().is_fp16_supported():
            raise ConfigurationError(
                f"precision={self._precision.precision!r}: DeepSpeed finds no float16 on "
                f"{self.root_device.type}. Write precision='bf16-mixed'."
            )
        self.layout.config = complete(self.config, self._precision.precision, self._keywords)

    def teardown(self) -> None:
        """Release groups, files and settings, and restore environment variables."""
        super().teardown()
        if self._restore is not None:
            self._restore.__exit__(None, None, None)
            self._restore = None

    def setup_module(self, module: Module) -> Module:
        """Return an engine around `module`, if DeepSpeed creates the optimizer or shards parameters; else
        `module` on the device, for evaluation. All ranks must call this.
        """
        if "optimizer" in self.config or self.zero_stage_3:
            return self.layout.make(module, None)  # type: ignore[no-any-return]
        broadcast_from_zero([*module.parameters(), *shared_buffers(module).values()])
        module._apply(CastTo(self._precision.dtype))  # type: ignore[attr-defined]
        return module.to(self.root_device)

    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], scheduler: Any | None = None
    ) -> tuple[Module, list[Optimizer], Any | None]:
        """Return (the engine of `module` and its optimizer, `optimizers`, `scheduler`). All ranks must call
        this.

        Raises:
            ConfigurationError: There are several optimizers, or the configuration has one, too.
        """
        if len(optimizers) > 1:
            raise ConfigurationError(
                f"A DeepSpeed engine has one optimizer, but fabric.setup got {len(optimizers)}. Give one "
                "with a group for each, or set parts of the model up as models of their own."
            )
        if "optimizer" in self.config:
            raise ConfigurationError(
                f'fabric.setup got {type(optimizers[0]).__name__}, and DeepSpeed\'s config has "optimizer": '
                f"{self.config['optimizer'].get('type')!r}. Leave one of them out; that of the config is "
                "optimizer = fabric.setup_optimizers(fabric.strategy.optimizer_of(model)) after model = "
                "fabric.setup_module(model)."
            )
        return self.layout.make(module, optimizers[0]), optimizers, scheduler

    def optimizer_of(self, model: Module) -> Optimizer:
        """Return the optimizer that DeepSpeed created by its configuration for `model`, to be given to
        `fabric.setup_optimizers`.

        Raises:
            ConfigurationError: The configuration has none.
        """
        return self.layout.optimizer_of(unwrap(model))

    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass, in float16 with the engine's loss scale. All ranks must call this.

        Arguments as for `Fabric.backward`.

        Raises:
            UsageError: In float16 there are several models and no `module`; or the loss is of no engine.
        """
        if self._precision.policy.loss_scale:
            engines = self.layout.stepped_engines()
            if module is None and len(engines) != 1:
                raise UsageError(
                    f"{len(engines)} models have a loss scale each. Write fabric.backward(loss, model=model)."
                )
            engine: Any = engines[0] if module is None else module
            tensor = engine.scale(tensor)
        self.layout.backward(type(tensor).backward, tensor, *args, **kwargs)

    def step_plan(self, optimizer: Optimizer) -> Callable[..., Any] | None:
        """Return the function that `optimizer.step(closure)` runs."""
        return self.optimizer_step

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the engine of `optimizer`, after one run of `closure`; return the closure's loss. All ranks
        must call this. Other `kwargs` are ignored.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.layout.step(optimizer)
        if hasattr(optimizer.step, COUNTED_STEP):
            setattr(optimizer, STEPPED, True)  # schedulers check that their optimizer was stepped
        return loss

    def save_checkpoint(
        self,
        path: PathLike,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: Filter | None = None,
        *,
        format: str | None = None,
        wait: bool = True,
        then: Callable[[], None] | None = None,
        facts: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
    ) -> PendingSave | None:
        """Save `state`. All ranks must call this.

        Without `format`, or with "deepspeed", it is saved as a DeepSpeed directory. Then `state` must have
        one model with its optimizer, and `filter` and `wait=False` are not supported. Arguments as for
        `Strategy.save_checkpoint`.

        Raises:
            UsageError: A `filter`, or `wait=False`, for a DeepSpeed directory.
        """
        asked = format or (self.state_dict_type if self.layout.engines_in(state) else "full")
        if asked != "deepspeed":
            more: Any = {"format": asked, "wait": wait, "then": then, "facts": facts}
            return super().save_checkpoint(
                path, state, storage_options, filter, allow_pickle=allow_pickle, **more
            )
        if filter or not wait:
            self.abort_call(
                "save",
                UsageError(
                    "DeepSpeed writes its directories whole and at once: it has no filter= and no "
                    "wait=False. Write format='full' or 'sharded'."
                ),
            )
        self.finish_save()
        self.check_barrier("save", "deepspeed")
        facts = {"strategy": type(self).__name__, "world_size": self.world_size, **(facts or {})}
        checkpoints.save(self, path, state, self._exclude_frozen, facts, then, allow_pickle)
        return None

    def saves_one_file(self, path: PathLike) -> bool:
        """Return False for any `path`: a save of an engine without `format` writes a directory."""
        return False

    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Load `state_dict` into `module`; return torch's missing and unexpected keys. All ranks must call
        this.

        `strict`: whether such keys raise, as in torch.
        """
        with self.layout.gathers():  # the base class reads the module's state dict
            return super().load_module_state_dict(module, state_dict, strict)

    @contextmanager
    def opened(
        self, path: PathLike, weights_only: bool | None = None, state: Any = None
    ) -> Iterator[dict[str, Any]]:
        """Check and open the checkpoint or DeepSpeed directory at `path`; yield its contents. All ranks must
        call this.

        Arguments as for `Strategy.opened`. DeepSpeed unpickles its directories: load only trusted ones.

        Raises:
            ConfigurationError: `weights_only=True` for a DeepSpeed directory.
            UsageError: Another number of ranks wrote the directory.
        """
        directory = checkpoints.directory_at(path)
        if directory is None:
            with super().opened(path, weights_only, state) as tree:
                yield tree
            return
        if weights_only:
            self.abort_call(
                "load",
                ConfigurationError(
                    f"weights_only=True was given for {path}, a directory of DeepSpeed's, which DeepSpeed "
                    "unpickles: it can run any code. Leave weights_only out if you trust the directory, else "
                    "load a checkpoint that was saved with format='full' or 'sharded'."
                ),
            )
        self.finish_save()
        self.check_barrier("load", "deepspeed")
        with states.together(self, f"loading {path}"):
            tree, content = checkpoints.check_directory(self, directory), content_of(directory)
        read = self._gather_all((content, str(path), self.topology.job_rank))
        with states.together(self, f"loading {path}"):
            compare_content(self, state, read)
        yield tree

    def restore(self, tree: dict[str, Any], state: Any, strict: bool) -> dict[str, Any]:
        """Load `tree` into `state`; return its other entries. All ranks must call this.

        `strict`: as for `Fabric.load`.
        """
        if isinstance(tree, checkpoints.CheckedDirectory):
            return checkpoints.load(self, tree.directory, state, strict)
        return super().restore(tree, state, strict)
