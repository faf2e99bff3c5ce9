//! Completing collectives later than the transport within, which several wrappers do for reasons of their own.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use zf_core::stage::{Group, Request, Ticket, TicketState, Transport};
use zf_core::{Error, Result};

/// A transport whose collectives can be held back after they completed.
///
/// The caller of `issue` is not held up: for each group and channel a thread (`defer-<rank>`) waits for tickets, in the order
/// of issue, and sleeps. One thread for all would let a collective that others issue late hold up those of other groups,
/// which a transport must not do.
pub(super) struct Deferring {
    /// Taken out in drop only.
    inner: Option<Box<dyn Transport>>,
    lanes: HashMap<Group, Lane>,
    /// Closed to end all sleep; nothing is ever sent.
    awake: Option<Sender<()>>,
    asleep: Receiver<()>,
}

struct Lane {
    queue: Sender<Message>,
    thread: JoinHandle<()>,
}

/// The moment at which the result is handed on, from the moment at which the collective completed.
type Until = Box<dyn FnOnce(Instant) -> Instant + Send>;

/// A ticket of the transport within, and who waits for it.
struct Message {
    ticket: Ticket,
    issued: Instant,
    until: Until,
    reply: Sender<Result<Vec<Vec<u8>>>>,
}

impl Deferring {
    pub(super) fn new(inner: Box<dyn Transport>) -> Self {
        let (awake, asleep) = bounded(0);
        Self { inner: Some(inner), lanes: HashMap::new(), awake: Some(awake), asleep }
    }

    /// Issues within; the ticket completes at the moment that `until` makes of the one at which the collective completed. For
    /// one that completed while the thread slept for the one before it, that is the moment of issue. Errors are handed on
    /// at once.
    pub(super) fn defer(
        &mut self,
        request: Request,
        until: impl FnOnce(Instant) -> Instant + Send + 'static,
    ) -> Result<Ticket> {
        let group = request.group.clone();
        let (issued, ticket) = (Instant::now(), self.issue(request)?);
        let (reply, answer) = bounded(1);
        let message = Message { ticket, issued, until: Box::new(until), reply };
        let gone = |_| Error::comm("a thread that holds collectives back has ended");
        self.lane(group)?.queue.send(message).map_err(gone)?;
        Ok(Ticket::new(Box::new(Late(answer))))
    }

    fn lane(&mut self, group: Group) -> Result<&Lane> {
        if !self.lanes.contains_key(&group) {
            let lane = Lane::start(self.rank(), self.asleep.clone())?;
            self.lanes.insert(group.clone(), lane);
        }
        Ok(&self.lanes[&group])
    }
}

impl Lane {
    fn start(rank: usize, asleep: Receiver<()>) -> Result<Self> {
        let (queue, messages) = unbounded::<Message>();
        let run = move || {
            for Message { ticket, issued, until, reply } in messages {
                let done = ticket.is_done();
                let result = ticket.bytes();
                let completed = if done { issued } else { Instant::now() };
                if result.is_ok() {
                    // Sleeps until then, or until the transport is dropped.
                    let _ = asleep.recv_deadline(until(completed));
                }
                // Nobody listens if the ticket was dropped.
                let _ = reply.try_send(result);
            }
        };
        let thread = std::thread::Builder::new().name(format!("defer-{rank}")).spawn(run);
        let thread = thread.map_err(|error| {
            Error::comm(format!("rank {rank}: cannot start a thread that holds collectives back: {error}"))
        })?;
        Ok(Self { queue, thread })
    }
}

impl Deref for Deferring {
    type Target = dyn Transport;

    fn deref(&self) -> &Self::Target {
        self.inner.as_deref().expect("it is taken out in drop only")
    }
}

impl DerefMut for Deferring {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.inner.as_deref_mut().expect("it is taken out in drop only")
    }
}

impl Drop for Deferring {
    fn drop(&mut self) {
        // Leaving ends the waits of the transport within, so that the threads find the ends of their queues.
        drop(self.inner.take());
        drop(self.awake.take());
        for (_, Lane { queue, thread }) in self.lanes.drain() {
            drop(queue);
            let _ = thread.join();
        }
    }
}

/// Ends when the thread has waited for the ticket within, which has an end.
struct Late(Receiver<Result<Vec<Vec<u8>>>>);

impl TicketState for Late {
    fn wait(self: Box<Self>) -> Result<Vec<Vec<u8>>> {
        let gone = |_| Error::comm("the transport was dropped before the collective was handed on");
        self.0.recv().map_err(gone)?
    }

    fn is_done(&self) -> bool {
        !self.0.is_empty()
    }
}
