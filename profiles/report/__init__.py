"""A profile for people: one HTML page that opens without a network, and its pictures.

derived   what the profile's numbers say when they are put together
words     numbers and names as text
tables    the same tables for terminals and pages
terminal  `droidspeak profile show`
pictures  drawn with pictures.mplstyle
page      page.html.jinja with style.css
"""
