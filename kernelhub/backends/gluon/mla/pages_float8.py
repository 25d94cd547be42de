# mypy: ignore-errors
"""Pages of 64 latents in float8 on their way to the tensor cores, which multiply float16: by registers of four warps.

Tensor cores multiply float16, which holds e4m3 exactly. Where pages of both do not fit in shared memory, half a page of
float8 is in registers, 16 bytes a load, until the place in shared memory is released that its float16 goes into. Rows
past a sequence's end are not read, and become zeros.
"""

from __future__ import annotations

from kernelhub.backends.gluon.language import bring_to_cache, gl, gluon, halves_of_float8
from kernelhub.backends.gluon.mla.listed_float8 import ACROSS, ENTRY

WIDTH = gl.constexpr(576)  # of a row, in bytes
LINES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def places_in_page(row_sixteens):
    """The rows of a page, and where their first 64 columns are, in words of four from the page's first."""
    rows = gl.arange(0, 64, ENTRY)
    return rows, (rows * (row_sixteens * 4))[:, None] + gl.arange(0, 16, ACROSS)[None, :]


@gluon.jit
def page_of(pages, index, count, last_page):
    """An entry of the block table; the first page in the place of one past the sequence's end."""
    page = gl.load(pages + index, mask=index < count, other=0)
    return gl.minimum(gl.maximum(page, 0), last_page)


@gluon.jit
def bring_page(cache, page, page_sixteens, rows, row_sixteens):
    """Bring the first rows of a page into the L2 cache, if there are no gaps between them."""
    nbytes = gl.where(row_sixteens == WIDTH // 16, gl.minimum(rows, 64) * WIDTH, 0)
    line = gl.arange(0, 512, LINES) * 128
    bring_to_cache(cache + page.to(gl.int64) * page_sixteens * 4 + line // 4, (line < nbytes).to(gl.int32))


@gluon.jit
def load_columns(cache, at, rows, page, page_sixteens, count, COLUMN: gl.constexpr):
    """64 columns of the first `count` rows of a page, as words of four; zeros in the place of others."""
    source = cache + page.to(gl.int64) * page_sixteens * 4 + COLUMN // 4
    return gl.load(source + at, mask=(rows < count)[:, None], other=0)


@gluon.jit
def load_left(cache, at, rows, page, page_sixteens, count):
    """The left half of the latents of a page."""
    a = load_columns(cache, at, rows, page, page_sixteens, count, 0)
    b = load_columns(cache, at, rows, page, page_sixteens, count, 64)
    c = load_columns(cache, at, rows, page, page_sixteens, count, 128)
    d = load_columns(cache, at, rows, page, page_sixteens, count, 192)
    return a, b, c, d


@gluon.jit
def load_right(cache, at, rows, page, page_sixteens, count):
    """The right half, and the rotary part."""
    a = load_columns(cache, at, rows, page, page_sixteens, count, 256)
    b = load_columns(cache, at, rows, page, page_sixteens, count, 320)
    c = load_columns(cache, at, rows, page, page_sixteens, count, 384)
    d = load_columns(cache, at, rows, page, page_sixteens, count, 448)
    rotary = load_columns(cache, at, rows, page, page_sixteens, count, 512)
    return a, b, c, d, rotary


@gluon.jit
def fill_columns(words, raw):
    """64 columns of a page as float16."""
    low, high = halves_of_float8(raw)
    words.store(gl.join(low, high).reshape([64, 32]))


@gluon.jit
def fill_half(words, a, b, c, d, ODD: gl.constexpr):
    """Half of the latents of the even or of the odd page; a fence has to follow."""
    fill_columns(words.index(ODD * 4), a)
    fill_columns(words.index(ODD * 4 + 1), b)
    fill_columns(words.index(ODD * 4 + 2), c)
    fill_columns(words.index(ODD * 4 + 3), d)
