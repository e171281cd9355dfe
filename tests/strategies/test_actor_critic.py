"""Loops in the manner of SAC and of PPO, beside plain torch on the joined batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from fabric import Fabric


class Setup:
    """What a loop sets up and calls: a `Fabric`, or plain torch where `strategy` is None."""

    def __init__(self, strategy: str | None) -> None:
        self.fabric = None
        if strategy is not None:
            self.fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
            self.fabric.launch()

    def model(self, module, optimizer=None):
        if self.fabric is None:
            return (module, optimizer) if optimizer else module
        return self.fabric.setup(module, optimizer) if optimizer else self.fabric.setup(module)

    def optimizer(self, optimizer):
        return optimizer if self.fabric is None else self.fabric.setup_optimizers(optimizer)

    def step(self, optimizer, loss) -> None:
        optimizer.zero_grad()
        loss.backward() if self.fabric is None else self.fabric.backward(loss)
        optimizer.step()

    def own(self, rows):
        """This rank's rows of a global batch."""
        fabric = self.fabric
        return rows if fabric is None else rows.chunk(fabric.world_size)[fabric.global_rank]


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def sac(setup: Setup, path: str | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    actor, critics = net(3, 2), [net(5, 1), net(5, 1)]
    targets = [copy.deepcopy(critic).requires_grad_(False) for critic in critics]
    actor, actor_optimizer = setup.model(actor, torch.optim.Adam(actor.parameters(), lr=0.02))
    critics = [setup.model(critic) for critic in critics]
    critic_optimizer = torch.optim.Adam([p for c in critics for p in c.parameters()], lr=0.02)
    critic_optimizer = setup.optimizer(critic_optimizer)
    targets = [setup.model(target) for target in targets]
    log_alpha = nn.Parameter(torch.zeros(1).double())
    alpha_optimizer = setup.optimizer(torch.optim.Adam([log_alpha], lr=0.05))
    random = torch.Generator().manual_seed(12)
    buffer = {"states": torch.zeros(0, 3).double(), "rewards": torch.zeros(0, 1).double()}

    for step in range(4):
        new = torch.randn(6, 3, generator=random).double()
        buffer["states"] = torch.cat([buffer["states"], new])
        buffer["rewards"] = torch.cat([buffer["rewards"], new.sum(1, keepdim=True)])
        rows = torch.randint(len(buffer["states"]), (6,), generator=random)
        noise = torch.randn(6, 2, generator=random).double()
        states, rewards, noise = map(setup.own, (buffer["states"][rows], buffer["rewards"][rows], noise))
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            actions = torch.tanh(actor(states) + noise)
            values = torch.min(*[target(torch.cat([states, actions], 1)) for target in targets])
            wanted = rewards + 0.9 * (values + alpha * actions.pow(2).sum(1, keepdim=True))
        seen = torch.cat([states, actions], 1)
        setup.step(critic_optimizer, sum(mse_loss(critic(seen), wanted) for critic in critics))

        actions = torch.tanh(actor(states) + noise)
        values = torch.min(*[critic(torch.cat([states, actions], 1)) for critic in critics])
        entropy = -actions.pow(2).sum(1, keepdim=True)
        for critic in critics:
            critic.requires_grad_(False)
        setup.step(actor_optimizer, (alpha * -entropy - values).mean())
        for critic in critics:
            critic.requires_grad_(True)
        setup.step(alpha_optimizer, (log_alpha.exp() * (entropy.detach() + 2)).mean())
        with torch.no_grad():
            for critic, target in zip(critics, targets, strict=True):
                for p, held in zip(critic.parameters(), target.parameters(), strict=True):
                    held.data.copy_(0.8 * held.data + 0.2 * p.data)
        if step == 1 and path is not None:
            state = {"actor": actor, "critics": critics, "targets": targets, "log_alpha": log_alpha}
            optimizers = [actor_optimizer, critic_optimizer, alpha_optimizer]
            state |= {"optimizers": optimizers, "buffer": buffer}
            setup.fabric.save(path, state, format="full")
            with torch.no_grad():
                log_alpha.fill_(9.0)
            buffer["states"] = buffer["states"] * 0
            setup.fabric.load(path, state)
            buffer = state["buffer"]
    nets = {"actor": actor, "one": critics[0], "two": critics[1], "target": targets[1]}
    values = {f"{name}.{key}": v for name, n in nets.items() for key, v in n.state_dict().items()}
    return {**values, "log_alpha": log_alpha.detach()}


def ppo(setup: Setup) -> dict[str, torch.Tensor]:
    """Actor and critic on one encoder, which the critic's optimizer steps."""
    torch.manual_seed(13)
    encoder = net(3, 6)
    actor = nn.Sequential(encoder, nn.Tanh(), nn.Linear(6, 4).double())
    critic = nn.Sequential(encoder, nn.Tanh(), nn.Linear(6, 1).double())
    actor_optimizer = torch.optim.Adam(actor[2].parameters(), lr=0.02)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.02)
    actor, actor_optimizer = setup.model(actor, actor_optimizer)
    critic, critic_optimizer = setup.model(critic, critic_optimizer)
    random = torch.Generator().manual_seed(14)
    for _ in range(2):
        states = setup.own(torch.randn(6, 3, generator=random).double())
        actions = setup.own(torch.randint(4, (6, 1), generator=random))
        returns = states.sum(1, keepdim=True)
        with torch.no_grad():
            before = actor(states).log_softmax(1).gather(1, actions)
            advantages = returns - critic(states)
        for _ in range(2):  # epochs over the rollout
            ratio = (actor(states).log_softmax(1).gather(1, actions) - before).exp()
            clipped = ratio.clamp(0.8, 1.2) * advantages
            setup.step(actor_optimizer, -torch.min(ratio * advantages, clipped).mean())
            setup.step(critic_optimizer, mse_loss(critic(states), returns))
    values = {f"actor.{key}": value for key, value in actor.state_dict().items()}
    return values | {f"critic.{key}": value for key, value in critic.state_dict().items()}


LOOPS = {"sac": sac, "ppo": ppo}


def like_one_process(loop: str, strategy: str, *args: str) -> None:
    found, plain = LOOPS[loop](Setup(strategy), *args), LOOPS[loop](Setup(None))
    torch.testing.assert_close(found, plain, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("loop", [*LOOPS])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_loop_equals_one_process(ranks, loop, strategy):
    ranks.run(like_one_process, loop, strategy, world_size=2)


@pytest.mark.parametrize("loop", [*LOOPS])
def test_a_loop_on_three_ranks(ranks, loop):
    ranks.run(like_one_process, loop, "ddp", world_size=3)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_sac_goes_on_from_a_checkpoint(ranks, strategy, tmp_path):
    ranks.run(like_one_process, "sac", strategy, str(tmp_path / "sac.pt"), world_size=2)
