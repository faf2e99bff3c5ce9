//! The thread that owns a rank's states off the device: it adds up gradients, updates, and hands columns over.
//!
//! Requests come in one queue. An update is made in pieces, between which the queue is looked at, so that landings never wait long
//! and columns are sent off at once. What a request does never depends on how far an update has come: elements that are taken
//! out in its middle are updated first if they were not yet.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};
use tch::{Kind, Tensor};
use zf_core::layout::DType;
use zf_core::stage::{HostPart, HostUpdate, Landing, Link, Optimizer, Span, Take, Taken, Tier};
use zf_core::trace::{Lane, Trace};
use zf_core::{Error, Result};
use zf_sys::heap::{Category, tag};

use super::apply;
use super::progress::Progress;
use super::sums::Sums;
use super::work::Work;
use crate::throttle::Throttle;

/// Elements that one thread updates between two looks at the queue.
const PIECE: usize = 1 << 18;

/// Seconds between two looks at the queue where the host is slowed down.
const GLANCE: f64 = 0.01;

/// Elements of several buffers, in column order.
pub(super) type Elements = Vec<(usize, Vec<Range<usize>>)>;

/// What the rank asks for.
pub(super) enum Request {
    Land(Result<Landing>),
    Update { update: HostUpdate, gives: u64 },
    Go,
    Give { elements: Elements, values: Result<Tensor> },
    Take { take: Take, gives: u64, updates: u64, reply: Sender<Result<Taken>> },
    Settle { reply: Sender<()> },
    Read { buffer: usize, array: usize, range: Range<usize>, reply: Sender<Vec<f32>> },
    Write { buffer: usize, array: usize, range: Range<usize>, values: Vec<f32>, reply: Sender<()> },
    Sums { window: u64, landings: u64, buffer: usize, reply: Sender<Vec<f32>> },
    SetSums { window: u64, buffer: usize, values: Vec<f32>, reply: Sender<()> },
}

/// Updated parameters on their way to the sender.
pub(super) struct Outgoing {
    pub(super) buffer: usize,
    pub(super) ranges: Vec<Range<usize>>,
    pub(super) values: Tensor,
    pub(super) bytes: usize,
}

pub(super) struct Actor {
    pub(super) requests: Receiver<Request>,
    pub(super) tier: Box<dyn Tier>,
    pub(super) optimizer: Arc<dyn Optimizer>,
    pub(super) link: Arc<dyn Link>,
    pub(super) sums: Sums,
    pub(super) arrays: usize,
    pub(super) out: Vec<DType>,
    pub(super) out_bytes: usize,
    pub(super) threads: usize,
    /// Whether the gradients' sizes are wanted.
    pub(super) measures: bool,
    pub(super) throttle: Throttle,
    pub(super) trace: Trace,
    pub(super) progress: Arc<Progress>,
    /// Landing memory that is free again.
    pub(super) memory: Sender<Tensor>,
    pub(super) outgoing: Sender<Outgoing>,
    /// Memory for outputs that is free again.
    pub(super) outputs: Receiver<Tensor>,
    pub(super) state: State,
}

/// What is under way.
#[derive(Default)]
pub(super) struct State {
    /// Landings of a window whose predecessor is not complete.
    early: VecDeque<Landing>,
    updates: VecDeque<(HostUpdate, u64)>,
    pub(super) present: Option<Present>,
    /// Updates that have begun.
    begun: u64,
    gives: u64,
    /// Requests that wait for something.
    waiting: Vec<Request>,
    open: Option<Outgoing>,
}

/// The update that is being made.
pub(super) struct Present {
    window: u64,
    pub(super) work: Work,
    held: bool,
}

impl Actor {
    /// Serves requests until nobody can make any.
    pub(super) fn run(mut self) -> Result<()> {
        loop {
            loop {
                let request = match self.is_busy() {
                    true => self.requests.try_recv().ok(),
                    false => match self.requests.recv() {
                        Ok(request) => Some(request),
                        Err(_) => return self.tier.flush(),
                    },
                };
                let Some(request) = request else { break };
                self.serve(request)?;
                self.begin()?;
                self.serve_waiting()?;
            }
            self.advance()?;
            self.begin()?;
            self.serve_waiting()?;
        }
    }

    fn is_busy(&self) -> bool {
        self.state.present.as_ref().is_some_and(|present| !present.held)
    }

    fn serve(&mut self, request: Request) -> Result<()> {
        match request {
            Request::Land(landing) => self.land(landing?),
            Request::Update { update, gives } => {
                self.state.updates.push_back((update, gives));
                Ok(())
            }
            Request::Go => {
                self.state.present.iter_mut().for_each(|present| present.held = false);
                self.state.updates.iter_mut().for_each(|(update, _)| update.hold = false);
                Ok(())
            }
            Request::Give { elements, values } => {
                let values = values?;
                self.state.gives += 1;
                self.exchange(&elements, &values, true)
            }
            other => {
                self.state.waiting.push(other);
                Ok(())
            }
        }
    }

    fn land(&mut self, landing: Landing) -> Result<()> {
        let idle = self.state.updates.is_empty() && self.state.present.is_none() && self.sums.landed() == 0;
        if idle {
            self.sums.skip_to(landing.window)?;
        }
        if landing.window > self.sums.window() {
            self.state.early.push_back(landing);
            return Ok(());
        }
        if landing.window < self.sums.window() {
            return Err(Error::Engine(format!(
                "gradients of window {} landed in window {}",
                landing.window,
                self.sums.window()
            )));
        }
        let started = Instant::now();
        let bytes = self.sums.land(landing)?;
        self.throttle.spend(bytes, || ());
        self.progress.added(started);
        self.trace.record(Lane::Host, "add gradients", None, started, Instant::now());
        let memory = match self.sums.spare() {
            Some(memory) => memory,
            None => {
                let _tag = tag(Category::Buffers);
                self.link.host_memory(self.out_bytes, Kind::Uint8)?
            }
        };
        // The rank may be gone.
        let _ = self.memory.send(memory);
        Ok(())
    }

    /// Begins the next update once everything that it builds on is there.
    fn begin(&mut self) -> Result<()> {
        while self.state.present.is_none() {
            let Some((update, gives)) = self.state.updates.front() else { return Ok(()) };
            if update.window > self.sums.window() && self.sums.landed() == 0 {
                self.sums.skip_to(update.window)?;
            }
            let complete = update.window == self.sums.window() && self.sums.landed() == update.landings;
            if !complete || self.state.gives < *gives {
                return Ok(());
            }
            let Some((update, _)) = self.state.updates.pop_front() else { return Ok(()) };
            self.state.begun += 1;
            self.sums.exchange()?;
            let spans: Vec<Span> =
                update.parts.iter().map(|part| Span { buffer: part.buffer, range: part.range.clone() }).collect();
            self.tier.announce(&spans)?;
            let (window, held) = (update.window, update.hold);
            let present = Present { window, work: Work::new(update.parts), held };
            self.state.present = (!present.work.is_empty() || held).then_some(present);
            for landing in std::mem::take(&mut self.state.early) {
                self.land(landing)?;
            }
        }
        Ok(())
    }

    /// Elements between two looks at the queue: fewer where the host is slow, so that columns are handed over at once all the
    /// same.
    fn piece(&self) -> usize {
        let most = PIECE * self.threads;
        let bytes = 8 * self.arrays + 8;
        self.throttle.rate().map_or(most, |rate| ((rate * GLANCE / bytes as f64) as usize).clamp(1 << 10, most))
    }

    /// Makes the next piece of the present update.
    fn advance(&mut self) -> Result<()> {
        let piece = self.piece();
        let Some(present) = self.state.present.as_mut().filter(|present| !present.held) else { return Ok(()) };
        let parts = present.work.next(piece);
        let done = present.work.is_empty();
        if !parts.is_empty() {
            self.update(&parts)?;
        }
        if done {
            self.state.present = None;
            self.sums.release();
            self.send();
            self.progress.holds(self.tier.bytes());
        }
        Ok(())
    }

    /// Updates parts of one buffer and puts their parameters into outputs.
    fn update(&mut self, parts: &[HostPart]) -> Result<()> {
        let Some(buffer) = parts.first().map(|part| part.buffer) else { return Ok(()) };
        let size = self.out[buffer].size();
        let mut rest: VecDeque<HostPart> = parts.to_vec().into();
        while !rest.is_empty() {
            if self.state.open.as_ref().is_some_and(|open| open.buffer != buffer || open.bytes + size > self.out_bytes)
            {
                self.send();
            }
            if self.state.open.is_none() {
                let values = self.output_memory()?;
                self.state.open = Some(Outgoing { buffer, ranges: Vec::new(), values, bytes: 0 });
            }
            let Some(open) = &mut self.state.open else { return Ok(()) };
            let mut room = (self.out_bytes - open.bytes) / size;
            let mut now = Vec::new();
            while let Some(part) = rest.front_mut().filter(|_| room > 0) {
                let len = part.range.len().min(room);
                let cut = part.range.start + len;
                now.push(HostPart { range: part.range.start..cut, ..part.clone() });
                (part.range.start, room) = (cut, room - len);
                if part.range.is_empty() {
                    rest.pop_front();
                }
            }
            let elements: usize = now.iter().map(|part| part.range.len()).sum();
            let out = open.values.f_narrow(0, open.bytes as i64, (elements * size) as i64)?;
            let out = out.f_view_dtype(self.out[buffer].kind())?;
            open.bytes += elements * size;
            open.ranges.extend(now.iter().map(|part| part.range.clone()));
            let started = Instant::now();
            let bytes = elements * (8 * self.arrays + self.sums.width(buffer) + size);
            let (tier, optimizer, threads) = (&mut *self.tier, &*self.optimizer, self.threads);
            let (sums, span) = (&mut self.sums, span(&now));
            let out = Some((&out, self.out[buffer]));
            let measures = self.measures;
            let absolute = self.throttle.spend(bytes as u64, || {
                let grads = sums.complete(buffer, &span)?;
                apply::update(tier, optimizer, &now, grads, out, threads)?;
                Ok::<_, Error>(if measures { absolute(&now, grads) } else { 0.0 })
            })?;
            self.progress.updated(started, elements as u64, absolute);
            self.trace.record(Lane::Host, "update", None, started, Instant::now());
        }
        Ok(())
    }

    fn output_memory(&self) -> Result<Tensor> {
        if let Ok(memory) = self.outputs.try_recv() {
            return Ok(memory);
        }
        let _tag = tag(Category::Buffers);
        self.link.host_memory(self.out_bytes, Kind::Uint8)
    }

    /// Hands the open output to the sender.
    fn send(&mut self) {
        if let Some(open) = self.state.open.take() {
            // The rank may be gone.
            let _ = self.outgoing.send(open);
        }
    }

    fn serve_waiting(&mut self) -> Result<()> {
        let mut still = Vec::new();
        for request in std::mem::take(&mut self.state.waiting) {
            if self.may(&request) { self.answer(request)? } else { still.push(request) }
        }
        self.state.waiting = still;
        Ok(())
    }

    /// Whether what a request waits for has happened.
    fn may(&self, request: &Request) -> bool {
        let State { updates, present, begun, gives, .. } = &self.state;
        match request {
            Request::Take { gives: wanted, updates, .. } => begun >= updates && gives >= wanted,
            Request::Sums { window, landings, .. } => {
                present.as_ref().is_some_and(|present| present.held && present.window == *window)
                    || updates.is_empty() && (self.sums.landed() >= *landings)
            }
            _ => updates.is_empty() && !self.is_busy(),
        }
    }

    fn answer(&mut self, request: Request) -> Result<()> {
        // Whoever asked may be gone.
        match request {
            Request::Take { take, reply, .. } => self.take(take, reply)?,
            Request::Settle { reply } => {
                self.tier.flush()?;
                let _ = reply.send(());
            }
            Request::Read { buffer, array, range, reply } => {
                let mut values = Vec::new();
                self.tier.with(&Span { buffer, range }, &mut |arrays| {
                    values.extend_from_slice(arrays[array]);
                    Ok(())
                })?;
                let _ = reply.send(values);
            }
            Request::Write { buffer, array, range, values, reply } => {
                self.tier.with(&Span { buffer, range }, &mut |arrays| {
                    arrays[array].copy_from_slice(&values);
                    Ok(())
                })?;
                let _ = reply.send(());
            }
            Request::Sums { window, buffer, reply, .. } => {
                let complete = self.state.present.as_ref().is_some_and(|present| present.window == window);
                let _ = reply.send(self.sums.copy(complete, window, buffer)?);
            }
            Request::SetSums { window, buffer, values, reply } => {
                self.sums.keep(window, buffer, values)?;
                let _ = reply.send(());
            }
            Request::Land(_) | Request::Update { .. } | Request::Go | Request::Give { .. } => {}
        }
        Ok(())
    }
}

/// From the first element of some parts to the last.
fn span(parts: &[HostPart]) -> Range<usize> {
    parts.first().map_or(0, |part| part.range.start)..parts.last().map_or(0, |part| part.range.end)
}

/// The sum of the absolute gradients of some parts, of which `grads` has all from the first to the last element; in pieces short
/// enough for float32.
fn absolute(parts: &[HostPart], grads: &[f32]) -> f64 {
    let first = span(parts).start;
    let own = |part: &HostPart| part.range.start - first..part.range.end - first;
    let pieces = parts.iter().flat_map(|part| grads[own(part)].chunks(256));
    pieces.map(|piece| f64::from(piece.iter().map(|grad| grad.abs()).sum::<f32>())).sum()
}
