//! A transport over a link of high latency.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use zf_core::stage::{Collective, CommBytes, Request, Ticket, TicketState, Transport};
use zf_core::trace::Trace;
use zf_core::{Error, Result};

/// Completes every collective of tensors `delay` later than the transport within: latency, not bandwidth, so that ten
/// collectives issued at once are all one delay late. Exchanges of a few bytes pass as they are.
///
/// The caller of `issue` is not held up. A thread of its own (`delay-<rank>`) sleeps in its stead.
pub struct Delayed {
    inner: Option<Box<dyn Transport>>,
    rank: usize,
    world: usize,
    delay: Duration,
    link: Option<Link>,
}

struct Link {
    queue: Sender<Message>,
    /// Closed to end the sleep.
    awake: Sender<()>,
    thread: JoinHandle<()>,
}

/// A ticket of the transport within, and who waits for it.
struct Message {
    ticket: Ticket,
    issued: Instant,
    reply: Sender<Result<Vec<Vec<u8>>>>,
}

impl Delayed {
    /// Delays what `inner` completes.
    pub fn new(inner: Box<dyn Transport>, delay: Duration) -> Self {
        let (rank, world) = (inner.rank(), inner.world());
        Self { inner: Some(inner), rank, world, delay, link: None }
    }

    fn inner(&self) -> &dyn Transport {
        self.inner.as_deref().expect("it is taken out in drop only")
    }

    fn link(&mut self) -> Result<&Link> {
        let link = match self.link.take() {
            Some(link) => link,
            None => Link::start(self.rank, self.delay)?,
        };
        Ok(self.link.insert(link))
    }
}

impl Link {
    fn start(rank: usize, delay: Duration) -> Result<Self> {
        let (queue, messages) = unbounded::<Message>();
        let (awake, asleep) = bounded::<()>(0);
        let thread = std::thread::Builder::new()
            .name(format!("delay-{rank}"))
            .spawn(move || {
                for Message { ticket, issued, reply } in messages {
                    // One that completed while the thread slept for another counts from its issue.
                    let done = ticket.is_done();
                    let result = ticket.bytes();
                    let completed = if done { issued } else { Instant::now() };
                    if result.is_ok() {
                        // Nothing is ever sent: this sleeps, unless the transport is dropped.
                        let _ = asleep.recv_deadline(completed + delay);
                    }
                    // Nobody listens if the ticket was dropped.
                    let _ = reply.try_send(result);
                }
            })
            .map_err(|error| Error::comm(format!("rank {rank}: cannot start the thread that delays: {error}")))?;
        Ok(Self { queue, awake, thread })
    }
}

impl Transport for Delayed {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn issue(&mut self, request: Request) -> Result<Ticket> {
        let inner = self.inner.as_mut().expect("it is taken out in drop only");
        let small = matches!(request.collective, Collective::Exchange { .. });
        let (issued, ticket) = (Instant::now(), inner.issue(request)?);
        if small {
            return Ok(ticket);
        }
        let (reply, answer) = bounded(1);
        let gone = || Error::comm("the delaying link has ended");
        self.link()?.queue.send(Message { ticket, issued, reply }).map_err(|_| gone())?;
        Ok(Ticket::new(Box::new(Late(answer))))
    }

    fn bytes(&self) -> CommBytes {
        self.inner().bytes()
    }

    fn record(&mut self, trace: &Trace) {
        self.inner.as_mut().expect("it is taken out in drop only").record(trace);
    }

    fn abort(&self, reason: &str) {
        self.inner().abort(reason);
    }
}

impl Drop for Delayed {
    fn drop(&mut self) {
        // Leaving ends the waits of the transport within, so that the thread finds the end of its queue.
        drop(self.inner.take());
        if let Some(Link { queue, awake, thread }) = self.link.take() {
            drop((queue, awake));
            let _ = thread.join();
        }
    }
}

/// Ends when the delaying thread has waited for the ticket within, which has an end.
struct Late(Receiver<Result<Vec<Vec<u8>>>>);

impl TicketState for Late {
    fn wait(self: Box<Self>) -> Result<Vec<Vec<u8>>> {
        let gone = |_| Error::comm("the delaying link ended before the collective did");
        self.0.recv().map_err(gone)?
    }

    fn is_done(&self) -> bool {
        !self.0.is_empty()
    }
}
