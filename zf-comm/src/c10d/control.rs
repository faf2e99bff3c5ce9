//! The thread of each rank that talks to the store: it publishes what the rank issued and that it lives, and learns which
//! ranks left and whether one failed. If the store's host stops, this thread alone hangs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use zf_sys::c10d::Store;

use super::book::Book;
use super::shared::{Failure, Shared};

/// How often a rank shows that it lives, and looks for news.
pub(crate) const TICK: Duration = Duration::from_millis(100);

/// Reading what is there takes no time, however loaded the host is; only a host that is gone makes it fail.
const LONG: Duration = Duration::from_secs(3600);
const FAILURE: &str = "failure";
const LEFT: &str = "left";
const DONE: &str = "done";
/// Values of the prepared store. Ranks that leave append to it.
const NOBODY: &[u8] = b" ";

/// What other threads want from the store.
pub(crate) enum Ask {
    /// Publish why everything ends; the reply is the reason that was first.
    Fail(String, Sender<String>),
    /// What is known of ranks, and with `for_life` whether they show life during three ticks.
    Look { ranks: Vec<usize>, for_life: bool, reply: Sender<Vec<Sight>> },
    /// A connection for another thread.
    Store(Sender<Store>),
    /// This rank leaves: publish the last state.
    Leave(Sender<()>),
    /// This rank will not ask the store for anything any more.
    Done(Sender<()>),
    /// End the thread.
    Stop,
}

/// What the store knows of a rank.
#[derive(Debug)]
pub(crate) struct Sight {
    pub(crate) rank: usize,
    /// `None` if it never connected.
    pub(crate) book: Option<Book>,
    pub(crate) left: bool,
    /// Whether it showed life while it was watched.
    pub(crate) alive: bool,
}

/// Prepares an empty store; by rank 0, before the others look.
pub(crate) fn prepare(store: &Store) -> zf_sys::Result<()> {
    store.set(DONE, NOBODY)?;
    store.set(LEFT, NOBODY)?;
    store.set(FAILURE, NOBODY)
}

/// Waits until the store is prepared.
pub(crate) fn await_prepared(store: &Store, timeout: Duration) -> zf_sys::Result<()> {
    store.wait(&[FAILURE, LEFT, DONE], timeout)
}

/// Runs until [`Ask::Stop`], or until the store is lost.
pub(crate) fn run(shared: &Arc<Shared>, store: &Store, asks: &Receiver<Ask>) {
    let mut control = Control { shared, store, beats: 0, published: None };
    let mut next = Instant::now();
    let outcome = loop {
        if next <= Instant::now() {
            next = Instant::now() + TICK;
            if let Err(error) = control.tick() {
                break Err(error);
            }
        }
        let done = match asks.recv_deadline(next) {
            Ok(Ask::Stop) | Err(RecvTimeoutError::Disconnected) => break Ok(()),
            Ok(ask) => control.answer(ask),
            Err(RecvTimeoutError::Timeout) => Ok(()),
        };
        if let Err(error) = done {
            break Err(error);
        }
    };
    if let Err(error) = outcome {
        // Later asks find nobody: those who wait for a reply go on without.
        let (host, error) = (&shared.store_host, error.to_string());
        let error = error.lines().next().unwrap_or_default();
        shared.end(Failure::Store(format!("{host}, which hosts the store of the run, is gone ({error})")));
    }
}

struct Control<'a> {
    shared: &'a Shared,
    store: &'a Store,
    beats: u64,
    published: Option<Book>,
}

impl Control<'_> {
    fn tick(&mut self) -> zf_sys::Result<()> {
        self.publish()?;
        let news = self.store.get(&[FAILURE, LEFT, DONE], LONG)?;
        self.shared.done.store(news[2].len() - NOBODY.len(), Ordering::Relaxed);
        if news[0] != NOBODY {
            self.shared.end(Failure::Reason(String::from_utf8_lossy(&news[0]).into_owned()));
        }
        let gone = news[1][NOBODY.len()..].chunks_exact(4);
        for rank in gone.map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize) {
            if rank != self.shared.rank && !self.shared.left.lock().contains(&rank) {
                let book = self.book(rank)?.unwrap_or_default();
                self.shared.left.lock().insert(rank);
                for line in self.shared.lines() {
                    line.cut(rank, &book);
                }
            }
        }
        Ok(())
    }

    fn publish(&mut self) -> zf_sys::Result<()> {
        let rank = self.shared.rank;
        let book = self.shared.book.lock().clone();
        if self.published.as_ref() != Some(&book) {
            let text = serde_json::to_vec(&book).expect("a book is plain data");
            self.store.set(&format!("book/{rank}"), &text)?;
            self.published = Some(book);
        }
        self.beats += 1;
        self.store.set(&format!("beat/{rank}"), &self.beats.to_le_bytes())
    }

    fn answer(&mut self, ask: Ask) -> zf_sys::Result<()> {
        // Whoever asked may have gone.
        match ask {
            Ask::Fail(reason, reply) => {
                let first = self.store.compare_set(FAILURE, NOBODY, reason.as_bytes())?;
                let _ = reply.send(String::from_utf8_lossy(&first).into_owned());
            }
            Ask::Look { ranks, for_life, reply } => {
                let _ = reply.send(self.look(&ranks, for_life)?);
            }
            Ask::Store(reply) => {
                let _ = reply.send(self.store.another()?);
            }
            Ask::Leave(reply) => {
                self.publish()?;
                self.store.append(LEFT, &(self.shared.rank as u32).to_le_bytes())?;
                let _ = reply.send(());
            }
            Ask::Done(reply) => {
                self.store.append(DONE, b"1")?;
                let _ = reply.send(());
            }
            Ask::Stop => {}
        }
        Ok(())
    }

    fn look(&mut self, ranks: &[usize], for_life: bool) -> zf_sys::Result<Vec<Sight>> {
        let before = self.beats_of(ranks)?;
        if for_life {
            for _ in 0..3 {
                std::thread::sleep(TICK);
                self.publish()?;
            }
        }
        let after = self.beats_of(ranks)?;
        let sight = |((rank, before), after): ((&usize, &Option<Vec<u8>>), &Option<Vec<u8>>)| {
            Ok(Sight {
                rank: *rank,
                book: self.book(*rank)?,
                left: self.shared.left.lock().contains(rank),
                alive: *rank == self.shared.rank || before != after,
            })
        };
        ranks.iter().zip(&before).zip(&after).map(sight).collect()
    }

    fn beats_of(&self, ranks: &[usize]) -> zf_sys::Result<Vec<Option<Vec<u8>>>> {
        ranks.iter().map(|rank| self.value(&format!("beat/{rank}"))).collect()
    }

    fn book(&self, rank: usize) -> zf_sys::Result<Option<Book>> {
        let text = self.value(&format!("book/{rank}"))?;
        // Another version's book tells nothing.
        Ok(text.map(|text| serde_json::from_slice(&text).unwrap_or_default()))
    }

    fn value(&self, key: &str) -> zf_sys::Result<Option<Vec<u8>>> {
        if !self.store.has(&[key])? {
            return Ok(None);
        }
        Ok(self.store.get(&[key], LONG)?.pop())
    }
}
