//! A transport that breaks at a chosen moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use zf_core::stage::{CommBytes, Request, Ticket, TicketState, Transport};
use zf_core::trace::Trace;
use zf_core::{Error, Result};

/// The moment, counted from 0 over the life of the transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// This call of `issue` fails, and the other ranks are left waiting.
    Issue(u64),
    /// This wait for a ticket fails, although the collective within completed.
    Wait(u64),
}

/// Fails once, with a given message. The other ranks learn nothing of it: telling them is up to the caller.
pub struct Failing {
    inner: Box<dyn Transport>,
    when: When,
    message: Arc<str>,
    issued: u64,
    waited: Arc<AtomicU64>,
}

impl Failing {
    /// Fails at `when` with `message`.
    pub fn new(inner: Box<dyn Transport>, when: When, message: &str) -> Self {
        Self { inner, when, message: message.into(), issued: 0, waited: Arc::default() }
    }
}

impl Transport for Failing {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world(&self) -> usize {
        self.inner.world()
    }

    fn issue(&mut self, request: Request) -> Result<Ticket> {
        let number = self.issued;
        self.issued += 1;
        if self.when == When::Issue(number) {
            return Err(Error::comm(&*self.message));
        }
        let ticket = self.inner.issue(request)?;
        Ok(match self.when {
            When::Issue(_) => ticket,
            When::Wait(fails) => Ticket::new(Box::new(Fragile {
                ticket,
                fails,
                waited: Arc::clone(&self.waited),
                message: Arc::clone(&self.message),
            })),
        })
    }

    fn bytes(&self) -> CommBytes {
        self.inner.bytes()
    }

    fn record(&mut self, trace: &Trace) {
        self.inner.record(trace);
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}

struct Fragile {
    ticket: Ticket,
    fails: u64,
    waited: Arc<AtomicU64>,
    message: Arc<str>,
}

impl TicketState for Fragile {
    fn wait(self: Box<Self>) -> Result<Vec<Vec<u8>>> {
        let number = self.waited.fetch_add(1, Ordering::Relaxed);
        // Waits in any case: the tensors are in use until then.
        let result = self.ticket.bytes();
        if number == self.fails { Err(Error::comm(&*self.message)) } else { result }
    }

    fn is_done(&self) -> bool {
        self.ticket.is_done()
    }
}
