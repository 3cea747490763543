"""Let transformers 5.24.0 make xLSTM models with fused projections, whose first values its code cannot form: import this."""

from transformers import xLSTMPreTrainedModel

own = xLSTMPreTrainedModel._init_weights


def first_values(self, module):
    if self.config.weight_mode == "single":
        own(self, module)


xLSTMPreTrainedModel._init_weights = first_values
