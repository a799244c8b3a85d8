"""Turn measurements into a verdict. Pure: no models, no devices, no clocks.

measured   the measured values
choice     which plans to decode, and which to try
gate       decides by held-out data whether the pair passes
artifact   makes the profile
"""
