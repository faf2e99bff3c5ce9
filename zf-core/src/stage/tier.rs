//! Where optimizer states lie that are not on the device.

use std::ops::Range;

use crate::Result;

/// Elements of one of a tier's buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Which buffer.
    pub buffer: usize,
    /// Which elements.
    pub range: Range<usize>,
}

/// Bytes that a tier holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierBytes {
    /// In host memory, working buffers included.
    pub host: u64,
    /// In files.
    pub file: u64,
}

/// A place for float32 masters and states, outside of the device. Of each buffer it keeps `arrays` arrays of the buffer's
/// length, all zero at first: array 0 is the master, the others are the rule's states in their order.
///
/// One thread uses it at a time.
pub trait Tier: Send {
    /// Says which spans [`Tier::with`] will be asked for next, in this order, so that they may be read ahead. What was
    /// announced before and not used is forgotten. Spans may be visited otherwise all the same.
    ///
    /// # Errors
    /// A failed read or write.
    fn announce(&mut self, spans: &[Span]) -> Result<()>;

    /// Calls `f` with all arrays of a span, each as long as the span; what `f` writes into them is kept.
    ///
    /// # Errors
    /// A span outside the buffer; a failed read or write, also one of an earlier write that was behind; what `f` returns.
    fn with(&mut self, span: &Span, f: &mut dyn FnMut(&mut [&mut [f32]]) -> Result<()>) -> Result<()>;

    /// Waits until all that was written is where it belongs.
    ///
    /// # Errors
    /// A failed write.
    fn flush(&mut self) -> Result<()>;

    /// What it holds now.
    fn bytes(&self) -> TierBytes;
}
