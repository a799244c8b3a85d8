"""Turn measurements into a verdict. Pure: no models, no devices, no clocks.

measured   the values that a run hands over
choice     which plans are worth their work; which are decoded, and tried by the gate
gate       may the pair be reused? data that chose nothing decide
artifact   all of it as a profile
"""
