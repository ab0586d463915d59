"""The supervisor's small web page, read-only: HTML and SVG made here, nothing is fetched.

history keeps what the chart needs in bounded memory, chart draws it, sections and html make the
page. All pure but for history; a page is made when somebody asks for it and not before.
"""
