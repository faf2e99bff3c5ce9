//! The pages that are in memory, with reads ahead and writes behind.
//!
//! A page is in one place only: in its file, on its way, or in memory. So whoever asks for it after a write that is still
//! under way gets what was written.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use zf_core::{Error, Result};

use super::memory::Memory;
use super::pages::Shape;
use super::workers::{Done, Job, Page, Workers};

/// The file of one buffer.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) shape: Shape,
    pub(super) file: Arc<File>,
    pub(super) path: PathBuf,
}

#[derive(Debug)]
enum Place {
    File,
    /// Being read or written.
    OnItsWay,
    Memory {
        memory: Memory,
        /// Whether the file has something older.
        changed: bool,
        /// When it was used last; larger is later.
        used: u64,
    },
}

/// All pages of all buffers, a bounded number of them in memory.
#[derive(Debug)]
pub(super) struct Cache {
    stores: Vec<Store>,
    places: Vec<Vec<Place>>,
    /// The pages whose place is memory.
    resident: Vec<Page>,
    free: Vec<Memory>,
    capacity: usize,
    workers: Workers,
    uses: u64,
    /// The first read or write that failed, for all calls after it.
    failed: Option<(PathBuf, io::ErrorKind, String)>,
}

impl Cache {
    /// Pages that are all in their files, with memory for some of them.
    pub(super) fn new(stores: Vec<Store>, pool: Vec<Memory>, workers: Workers) -> Self {
        let places = stores.iter().map(|store| (0..store.shape.pages()).map(|_| Place::File).collect()).collect();
        let capacity = pool.len();
        Self { stores, places, resident: Vec::new(), free: pool, capacity, workers, uses: 0, failed: None }
    }

    pub(super) fn stores(&self) -> &[Store] {
        &self.stores
    }

    /// How many pages fit into memory.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// The error of everything that comes after a failed read or write.
    pub(super) fn check(&self) -> Result<()> {
        let Some((path, kind, text)) = &self.failed else { return Ok(()) };
        Err(Error::io(path, io::Error::new(*kind, text.clone())))
    }

    /// Brings `wanted` into memory and waits for it, and begins to read what is needed `soon` after. At most
    /// [`Cache::capacity`] pages can be wanted.
    pub(super) fn load(&mut self, wanted: &[Page], soon: &[Page]) -> Result<()> {
        self.collect()?;
        for &page in wanted {
            if matches!(self.place(page), Place::File) {
                let memory = self.make_room(wanted, soon)?;
                self.read(page, memory)?;
            }
        }
        self.read_ahead(wanted, soon)?;
        for &page in wanted {
            loop {
                match self.place(page) {
                    Place::Memory { .. } => break,
                    Place::OnItsWay => self.wait()?,
                    // It was on its way when the others were asked for.
                    Place::File => {
                        let memory = self.make_room(wanted, soon)?;
                        self.read(page, memory)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The memory of a loaded page, which is taken to be changed from now on.
    pub(super) fn change(&mut self, page: Page) -> Result<&mut Memory> {
        self.uses += 1;
        let uses = self.uses;
        match &mut self.places[page.buffer][page.page] {
            Place::Memory { memory, changed, used } => {
                (*changed, *used) = (true, uses);
                Ok(memory)
            }
            _ => {
                Err(Error::Engine(format!("page {} of buffer {} is used before it is loaded", page.page, page.buffer)))
            }
        }
    }

    /// Begins to read what is needed `soon`, in its order, as far as there is memory that holds nothing needed sooner.
    /// Waits for nothing.
    pub(super) fn read_ahead(&mut self, kept: &[Page], soon: &[Page]) -> Result<()> {
        for &page in soon {
            if !matches!(self.place(page), Place::File) {
                continue;
            }
            let Some(memory) = self.free.pop().or_else(|| self.evict(kept, soon, false)) else { break };
            self.read(page, memory)?;
        }
        Ok(())
    }

    /// Begins to write what has changed and is not needed `soon`. Waits for nothing.
    pub(super) fn write_behind(&mut self, soon: &[Page]) -> Result<()> {
        self.collect()?;
        for page in self.changed_pages() {
            if !soon.contains(&page) {
                self.write(page)?;
            }
        }
        Ok(())
    }

    /// Writes all that has changed and waits for everything under way.
    pub(super) fn flush(&mut self) -> Result<()> {
        for page in self.changed_pages() {
            self.write(page)?;
        }
        while self.workers.busy() {
            self.wait()?;
        }
        self.check()
    }

    fn place(&self, page: Page) -> &Place {
        &self.places[page.buffer][page.page]
    }

    fn changed_pages(&self) -> Vec<Page> {
        let changed = |page: &&Page| matches!(self.place(**page), Place::Memory { changed: true, .. });
        self.resident.iter().filter(changed).copied().collect()
    }

    /// Memory for a page, which may have to be waited for.
    fn make_room(&mut self, kept: &[Page], soon: &[Page]) -> Result<Memory> {
        loop {
            if let Some(memory) = self.free.pop().or_else(|| self.evict(kept, soon, true)) {
                return Ok(memory);
            }
            if let Some(page) =
                self.changed_pages().into_iter().filter(|page| !kept.contains(page)).max_by_key(|page| {
                    // What is needed last goes first.
                    soon.iter().position(|next| next == page).unwrap_or(usize::MAX)
                })
            {
                self.write(page)?;
            }
            if !self.workers.busy() {
                return Err(Error::Engine(format!(
                    "a pool of {} pages is too small for what is wanted",
                    self.capacity
                )));
            }
            self.wait()?;
        }
    }

    /// Takes the memory of an unchanged page that is not `kept`: the one unused for longest of those not needed `soon`, else,
    /// if `also_soon`, the one needed last.
    fn evict(&mut self, kept: &[Page], soon: &[Page], also_soon: bool) -> Option<Memory> {
        let rank = |page: &Page| match self.place(*page) {
            Place::Memory { changed: false, used, .. } if !kept.contains(page) => {
                match soon.iter().position(|next| next == page) {
                    None => Some((0, *used)),
                    Some(position) if also_soon => Some((1, u64::MAX - position as u64)),
                    Some(_) => None,
                }
            }
            _ => None,
        };
        let ranked = self.resident.iter().enumerate().filter_map(|(index, page)| Some((rank(page)?, index)));
        let (_, index) = ranked.min()?;
        let page = self.resident.swap_remove(index);
        self.leave(page, Place::File)
    }

    /// Gives a page another place; the memory, if it was there.
    fn leave(&mut self, page: Page, to: Place) -> Option<Memory> {
        match std::mem::replace(&mut self.places[page.buffer][page.page], to) {
            Place::Memory { memory, .. } => Some(memory),
            _ => None,
        }
    }

    fn read(&mut self, page: Page, memory: Memory) -> Result<()> {
        self.places[page.buffer][page.page] = Place::OnItsWay;
        self.submit(page, false, memory)
    }

    fn write(&mut self, page: Page) -> Result<()> {
        self.resident.retain(|other| *other != page);
        match self.leave(page, Place::OnItsWay) {
            Some(memory) => self.submit(page, true, memory),
            None => Err(Error::Engine(format!("page {} of buffer {} is not in memory", page.page, page.buffer))),
        }
    }

    fn submit(&mut self, page: Page, write: bool, memory: Memory) -> Result<()> {
        let Store { shape, file, .. } = &self.stores[page.buffer];
        let (file, offset, bytes) = (Arc::clone(file), shape.offset(page.page), shape.page_bytes(page.page));
        self.workers.submit(Job { page, write, file, offset, bytes, memory })
    }

    /// Takes in what has ended meanwhile.
    fn collect(&mut self) -> Result<()> {
        while let Some(done) = self.workers.poll() {
            self.take_in(done);
        }
        self.check()
    }

    fn wait(&mut self) -> Result<()> {
        let done = self.workers.wait()?;
        self.take_in(done);
        self.check()
    }

    fn take_in(&mut self, done: Done) {
        let Done { page, write, memory, result } = done;
        let failed = result.is_err();
        if let Err(error) = result {
            let path = self.stores[page.buffer].path.clone();
            self.failed.get_or_insert((path, error.kind(), error.to_string()));
        }
        if failed && !write {
            self.leave(page, Place::File);
            self.free.push(memory);
            return;
        }
        self.uses += 1;
        // What could not be written is still only here.
        let place = Place::Memory { memory, changed: failed, used: self.uses };
        self.leave(page, place);
        self.resident.push(page);
    }
}
