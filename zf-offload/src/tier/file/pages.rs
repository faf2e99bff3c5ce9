//! Where the elements of a buffer lie in its file.

use std::ops::Range;

/// What direct IO reads and writes: offsets, lengths and addresses are multiples of it.
pub(super) const BLOCK: usize = 4096;

/// Elements of one array in a block.
const ALIGN: usize = BLOCK / size_of::<f32>();

/// The most elements of one array in a page: 4 MiB of each array are read at once, which is enough for any drive's full
/// speed.
const LARGEST: usize = 1 << 20;

/// One buffer's place in its file: a block of header, then pages. A page holds the same elements of all arrays, one array
/// after the other, so that it is read in one piece. Only the last page may be shorter; it is padded to blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Elements of each array.
    pub(super) len: usize,
    pub(super) arrays: usize,
    /// Elements of each array in a full page, a multiple of a block.
    pub(super) page: usize,
}

impl Shape {
    /// Pages that fit spans of up to `largest_span` elements.
    pub(super) fn new(len: usize, arrays: usize, largest_span: usize) -> Self {
        Self { len, arrays, page: largest_span.clamp(1, LARGEST).next_multiple_of(ALIGN) }
    }

    /// The number of pages.
    pub(super) fn pages(&self) -> usize {
        if self.arrays == 0 { 0 } else { self.len.div_ceil(self.page) }
    }

    /// Elements of each array in a page, with the padding.
    pub(super) fn page_len(&self, page: usize) -> usize {
        (self.len - page * self.page).next_multiple_of(ALIGN).min(self.page)
    }

    /// Bytes of a page.
    pub(super) fn page_bytes(&self, page: usize) -> usize {
        self.arrays * self.page_len(page) * size_of::<f32>()
    }

    /// Bytes of the largest page.
    pub(super) fn largest_page_bytes(&self) -> usize {
        if self.pages() == 0 { 0 } else { self.page_bytes(0) }
    }

    /// Where a page begins in the file.
    pub(super) fn offset(&self, page: usize) -> u64 {
        BLOCK as u64 + page as u64 * (self.arrays * self.page * size_of::<f32>()) as u64
    }

    /// Bytes of the file.
    pub(super) fn file_bytes(&self) -> u64 {
        match self.pages() {
            0 => BLOCK as u64,
            pages => self.offset(pages - 1) + self.page_bytes(pages - 1) as u64,
        }
    }

    /// The pages that hold a part of `range`.
    pub(super) fn touched(&self, range: &Range<usize>) -> Range<usize> {
        if range.is_empty() || self.arrays == 0 {
            return 0..0;
        }
        range.start / self.page..range.end.div_ceil(self.page)
    }

    /// The most pages that a span of so many elements touches, wherever it begins.
    pub(super) fn most_touched(&self, elements: usize) -> usize {
        (elements.saturating_sub(1) / self.page + 2).min(self.pages())
    }

    /// The part of `range` that lies in `page`, counted from the page's first element, and from the range's first.
    pub(super) fn part(&self, page: usize, range: &Range<usize>) -> (Range<usize>, Range<usize>) {
        let first = page * self.page;
        let (start, end) = (range.start.max(first), range.end.min(first + self.page));
        (start - first..end - first, start - range.start..end - range.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_each_other_in_blocks() {
        let shape = Shape::new(5000, 3, 2000);
        assert_eq!((shape.page, shape.pages()), (2048, 3));
        assert_eq!([0, 1, 2].map(|page| shape.page_len(page)), [2048, 2048, 1024]);
        assert_eq!(shape.offset(2), 4096 + 2 * 3 * 2048 * 4);
        assert_eq!(shape.file_bytes(), shape.offset(2) + 3 * 1024 * 4);
        assert_eq!(shape.touched(&(2047..2048)), 0..1);
        assert_eq!(shape.touched(&(2047..4097)), 0..3);
        assert_eq!(shape.touched(&(5000..5000)), 0..0);
        assert_eq!(shape.part(1, &(2000..4999)), (0..2048, 48..2096));
        assert_eq!((shape.most_touched(1), shape.most_touched(2000), shape.most_touched(5000)), (2, 2, 3));
    }

    #[test]
    fn nothing_has_no_pages_and_large_spans_have_several() {
        for shape in [Shape::new(0, 3, 10), Shape::new(10, 0, 10)] {
            assert_eq!((shape.pages(), shape.file_bytes(), shape.most_touched(10)), (0, 4096, 0));
        }
        assert_eq!(Shape::new(1 << 30, 3, usize::MAX).page, LARGEST);
        // 24 GB: no offset is cut to 32 bits.
        assert_eq!(Shape::new(2_000_000_000, 3, 1 << 20).offset(1907), 4096 + 1907 * 12 * (1 << 20));
    }
}
