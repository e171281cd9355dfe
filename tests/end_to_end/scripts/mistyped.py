"""What type checkers must refuse; each line with the name in its comment. Never run."""

from torch import nn
from torch.optim import SGD

from fabric import Fabric

fabric = Fabric()
net = nn.Linear(1, 1)
model, optimizer = fabric.setup(net, SGD(net.parameters()))
model.in_features.upper()  # "upper"
optimizer.stepp()  # "stepp"
fabric.setup("net")  # "setup"
fabric.setup(net, "sgd")  # "setup"
a, b, c = fabric.setup(net, SGD(net.parameters()))  # 3
