//! Gradients on their way to the host, through staging buffers of constant size.
//!
//! What leaves is cut into pieces of at most one buffer. A piece waits here until a staging buffer is free, is packed into it in
//! column order, and crosses the link while the device goes on. The gradients themselves must not change before their pieces
//! are packed: whoever is about to overwrite them calls [`Outbox::pack_all_of`] first.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use tch::{Kind, Tensor};
use zf_sys::heap::{Category, tag};

use super::columns::{Columns, total};
use super::pack::gather;
use crate::engine::flat::{int, narrow};
use crate::stage::{HostPool, Landing, Link, Transfer, Way};
use crate::trace::Trace;
use crate::{Error, Result};

/// How long a staging buffer may take to come back.
const PATIENCE: Duration = Duration::from_secs(600);

/// Where gradients are until they are packed.
#[derive(Debug)]
pub(crate) enum Source {
    /// By block of the column order: its elements in the flat buffer's order. None where no range is of that block.
    Rows { columns: Arc<Columns>, blocks: Vec<Option<Tensor>> },
    /// The elements of the ranges one after the other, float32.
    Packed(Tensor),
}

impl Source {
    /// Another handle of the same memory.
    fn share(&self) -> Self {
        match self {
            Self::Rows { columns, blocks } => Self::Rows {
                columns: Arc::clone(columns),
                blocks: blocks.iter().map(|block| block.as_ref().map(Tensor::shallow_clone)).collect(),
            },
            Self::Packed(values) => Self::Packed(values.shallow_clone()),
        }
    }
}

/// What a piece is for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Errand {
    pub(crate) window: u64,
    pub(crate) buffer: usize,
    /// Type on the link.
    pub(crate) wire: Kind,
    pub(crate) scale: f32,
    pub(crate) replace: bool,
}

/// At most one staging buffer of gradients of one flat buffer.
#[derive(Debug)]
struct Piece {
    errand: Errand,
    /// In column order.
    ranges: Vec<Range<usize>>,
    source: Source,
    /// Where a packed source has the first of them.
    at: usize,
}

pub(crate) struct Outbox {
    waiting: VecDeque<Piece>,
    /// Staging buffers of raw bytes, in use and free.
    free: Receiver<Tensor>,
    back: Sender<Tensor>,
    bytes: usize,
    /// Pieces of the present window, waiting ones included.
    pieces: u64,
    waited: Duration,
}

impl Outbox {
    /// An outbox with `buffers` staging buffers of `bytes` bytes.
    pub(crate) fn new(buffers: usize, bytes: usize, device: tch::Device) -> Result<Self> {
        let (back, free) = unbounded();
        let _tag = tag(Category::Buffers);
        for _ in 0..buffers {
            let buffer = Tensor::f_empty([int(bytes)?], (Kind::Uint8, device))?;
            // The other end is in `self`.
            let _ = back.send(buffer);
        }
        Ok(Self { waiting: VecDeque::new(), free, back, bytes, pieces: 0, waited: Duration::ZERO })
    }

    /// Time spent waiting since the last call.
    pub(crate) fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }

    /// Adds ranges (column order) to what leaves.
    pub(crate) fn put(&mut self, errand: Errand, ranges: &[Range<usize>], source: &Source) {
        let capacity = (self.bytes / errand.wire.elt_size_in_bytes()).max(1);
        let (mut piece, mut room, mut at) = (Vec::new(), capacity, 0);
        let mut close = |piece: &mut Vec<Range<usize>>, at: &mut usize| {
            if !piece.is_empty() {
                let ranges = std::mem::take(piece);
                let len = total(&ranges);
                self.waiting.push_back(Piece { errand, ranges, source: source.share(), at: *at });
                self.pieces += 1;
                *at += len;
            }
        };
        for range in ranges {
            let mut rest = range.clone();
            while !rest.is_empty() {
                let part = rest.start..rest.end.min(rest.start + room);
                (rest.start, room) = (part.end, room - part.len());
                piece.push(part);
                if room == 0 {
                    close(&mut piece, &mut at);
                    room = capacity;
                }
            }
        }
        close(&mut piece, &mut at);
    }

    /// The window is complete: how many pieces it has. Counting starts anew.
    pub(crate) fn end_window(&mut self) -> u64 {
        std::mem::take(&mut self.pieces)
    }

    /// Pieces of the present window so far.
    pub(crate) fn pieces(&self) -> u64 {
        self.pieces
    }

    /// Packs and sends what buffers are free for.
    pub(crate) fn pump(&mut self, pool: &mut dyn HostPool, link: &Arc<dyn Link>) -> Result<()> {
        while !self.waiting.is_empty() && !self.free.is_empty() {
            let Some(memory) = pool.landing_memory(false)? else { return Ok(()) };
            self.send(pool, link, memory)?;
        }
        Ok(())
    }

    /// Packs everything of one flat buffer, or of all, waiting for buffers; nothing reads those gradients afterwards.
    pub(crate) fn pack_all_of(
        &mut self,
        buffer: Option<usize>,
        pool: &mut dyn HostPool,
        link: &Arc<dyn Link>,
        trace: &Trace,
    ) -> Result<()> {
        self.pack_while(&|errand| buffer.is_none_or(|buffer| errand.buffer == buffer), pool, link, trace)
    }

    /// Packs everything of the windows up to `window`, waiting for buffers: whoever is about to wait for their update would
    /// wait for ever otherwise.
    pub(crate) fn pack_until(
        &mut self,
        window: u64,
        pool: &mut dyn HostPool,
        link: &Arc<dyn Link>,
        trace: &Trace,
    ) -> Result<()> {
        self.pack_while(&|errand| errand.window <= window, pool, link, trace)
    }

    /// Packs, in order, until none of the wanted is left.
    fn pack_while(
        &mut self,
        wanted: &dyn Fn(&Errand) -> bool,
        pool: &mut dyn HostPool,
        link: &Arc<dyn Link>,
        trace: &Trace,
    ) -> Result<()> {
        while self.waiting.iter().any(|piece| wanted(&piece.errand)) {
            self.pump(pool, link)?;
            if !self.waiting.iter().any(|piece| wanted(&piece.errand)) {
                break;
            }
            let started = Instant::now();
            let _wait = trace.wait("wait", "the link to take gradients");
            if let Some(memory) = pool.landing_memory(true)? {
                self.send(pool, link, memory)?;
            }
            self.waited += started.elapsed();
        }
        Ok(())
    }

    /// Packs the first piece into a staging buffer, for which it waits, and sends it.
    fn send(&mut self, pool: &mut dyn HostPool, link: &Arc<dyn Link>, memory: Tensor) -> Result<()> {
        let Some(piece) = self.waiting.pop_front() else { return Ok(()) };
        let staging = self.free.recv_timeout(PATIENCE).map_err(|_| {
            Error::Engine(format!("the link did not give a staging buffer back within {} s", PATIENCE.as_secs()))
        })?;
        let Errand { window, buffer, wire, scale, replace } = piece.errand;
        let len = total(&piece.ranges);
        let ranges = piece.ranges;
        let bytes = int(len * wire.elt_size_in_bytes())?;
        let typed = staging.f_narrow(0, 0, bytes)?.f_view_dtype(wire)?;
        match &piece.source {
            Source::Rows { columns, blocks } => {
                let missing = || Error::Engine("a gradient left before it was there".into());
                let rows = |block: usize| Ok(blocks[block].as_ref().ok_or_else(missing)?.shallow_clone());
                gather(columns, &ranges, &rows, &typed)?;
            }
            Source::Packed(values) => typed.shallow_clone().f_copy_(&narrow(values, piece.at..piece.at + len)?)?,
        }
        let (back, inlet) = (self.back.clone(), pool.inlet());
        let from = staging.f_narrow(0, 0, bytes)?;
        let to = memory.f_narrow(0, 0, bytes)?;
        let done = Box::new(move |result: Result<crate::stage::Arrived>| {
            // Whoever would use the buffer may be gone.
            let _ = back.send(staging);
            inlet(result.map(|_| Landing { window, buffer, ranges, values: memory, scale, replace }));
        });
        link.issue(Transfer { way: Way::ToHost, from, to, label: "gradients".into(), moves: false, done })
    }
}
