"""Turn measurements into a verdict. Pure: no models, no devices, no clocks.

measured   the values that a run hands over
choice     which plans are decoded, and which of them the gate tries
gate       may the receiver reuse the sender's KV? held-out data decide
artifact   makes a profile of all these
"""
