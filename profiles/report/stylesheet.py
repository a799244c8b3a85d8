"""How the page looks: on a phone, on a wide screen, in the dark and on paper."""

from __future__ import annotations

from typing import Final

STYLESHEET: Final = """
:root { color-scheme: light dark; --ink: #1f2937; --soft: #5b6472; --paper: #ffffff;
  --card: #f5f6f8; --line: #d5d9e0; --passed: #00694c; --failed: #a33c00; --marked: #e8f1f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e5e7eb; --soft: #a3acb9; --paper: #15181d; --card: #1f242b; --line: #3a414c;
    --passed: #4cd0a4; --failed: #ff9a5c; --marked: #22364a; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 80rem; margin: 0 auto; padding: 1rem; }
p, header, figure { max-width: 62rem; }
header { border: 1px solid var(--line); border-left: 0.5rem solid var(--failed);
  border-radius: 0.5rem; background: var(--card); padding: 1rem 1.25rem; }
header.passed { border-left-color: var(--passed); }
header p { margin: 0.5rem 0; }
h1 { margin: 0; font-size: 2.25rem; line-height: 1.2; color: var(--failed); }
header.passed h1 { color: var(--passed); }
h2 { margin: 2.5rem 0 0.5rem; padding-bottom: 0.25rem; border-bottom: 1px solid var(--line); }
h3 { margin: 0 0 0.5rem; }
.reason { font-size: 1.15rem; }
dl { display: flex; flex-wrap: wrap; gap: 0.75rem 2rem; margin: 1rem 0; }
dl div { display: flex; flex-direction: column-reverse; }
dt { color: var(--soft); font-size: 0.875rem; }
dd { margin: 0; font-size: 1.75rem; font-weight: 600; line-height: 1.2; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.75rem 0.35rem 0; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top; }
thead th { color: var(--soft); font-weight: 600; }
tbody th { font-weight: 500; }
.numbers { width: 100%; }
.numbers td, .numbers thead th:not(:first-child) { text-align: right; white-space: nowrap;
  padding-right: 0; padding-left: 0.75rem; }
.numbers thead th:not(:first-child) { white-space: normal; }
.numbers .marked th, .numbers .marked td { background: var(--marked); font-weight: 700; }
.prose { width: 100%; }
.prose td { overflow-wrap: anywhere; min-width: 9rem; }
.prose .marked th { font-weight: 700; }
small { color: var(--soft); }
figure { margin: 1.5rem 0 2.5rem; }
img { display: block; width: 100%; min-width: 38rem; height: auto; background: #ffffff;
  padding: 0.5rem; border: 1px solid var(--line); border-radius: 0.5rem; }
figcaption { margin-top: 0.5rem; }
@media print {
  :root { --ink: #000000; --soft: #444444; --paper: #ffffff; --card: #ffffff; --line: #bbbbbb;
    --passed: #00694c; --failed: #a33c00; --marked: #eeeeee; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  h2, h3 { break-after: avoid; }
  figure, header, tr { break-inside: avoid; }
  .wide { overflow: visible; }
  table { font-size: 8pt; }
  img { min-width: 0; max-height: 9.6cm; object-fit: contain; border: none; }
}
"""
"""No address in it, so that the page loads nothing."""
