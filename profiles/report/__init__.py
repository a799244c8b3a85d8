"""A profile for people: one HTML page that opens without a network, and its pictures.

derived   conclusions from several of the profile's numbers
words     numbers and names as text
tables    the same tables for terminals and pages
terminal  `droidspeak profile show`
pictures  drawn with pictures.mplstyle
page      page.html.jinja with style.css
"""
