"""Up to which length decode should compute prompts itself: `BATON_LOCAL_PREFILL_MAX_TOKENS`, measured.

A prompt that is handed over pays for the hop and keeps its computing away from the replies that run;
one that stays pays no hop and makes a step of theirs longer. Which is less depends on the model and the
machine. So both ways are timed here on real workers, with nothing else running and beside steady streams, and
the threshold is what the figures allow. Decode is asked directly: a gateway would add the same to both ways.
"""
