import os

import torch

# the models of the tests are so small that a second thread only costs
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
