//! States in files.

mod cache;
mod disk;
mod folder;
mod header;
mod memory;
mod open;
mod pages;
mod workers;

use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use zf_core::bytes::ByteSize;
use zf_core::stage::{Span, Tier, TierBytes};
use zf_core::{Error, Result};

use self::cache::Cache;
use self::disk::{Disk, System};
use self::folder::Folder;
use self::memory::Memory;
use self::pages::{BLOCK, Shape};
use self::workers::{Page, Workers};
use super::memory::inside;

/// How a [`FileTier`] works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSettings {
    /// The most elements of a span. Spans that begin at its multiples, when it is a multiple of 1024 and at most 2^20, need
    /// no copy.
    pub largest_span: usize,
    /// Bytes of memory for pages; by default enough to use a span while two are read and written. Reserved when the tier is
    /// made.
    pub pool: Option<u64>,
    /// Threads that read and write.
    pub threads: usize,
    /// The cores of these threads; empty: any.
    pub cores: Vec<usize>,
    /// Whether to go past the system's cache where the file system allows it.
    pub direct: bool,
}

impl Default for FileSettings {
    fn default() -> Self {
        Self { largest_span: 1 << 18, pool: None, threads: 2, cores: Vec::new(), direct: true }
    }
}

/// Arrays in files, one for each buffer, of which a bounded part is in memory.
///
/// Spans that were announced are read ahead and written behind by threads of the tier. The files lie in a folder of their
/// own, take their room on the drive when they are made, and are removed when the tier is dropped; what dead runs left in
/// the same place is removed first. A read or write that failed is the error of the call that needs it and of all after.
pub struct FileTier {
    // Dropped first: its threads end before the files go.
    cache: Cache,
    announced: VecDeque<Span>,
    /// For spans that lie in more than one page.
    scratch: Option<Memory>,
    block: Memory,
    bytes: TierBytes,
    notes: Vec<String>,
    disk: Arc<dyn Disk>,
    _folder: Folder,
}

impl FileTier {
    /// For each of `lens` a buffer of so many elements, `arrays` arrays each, all zero, in a new folder in `folder`.
    ///
    /// # Errors
    /// A full drive (with the bytes needed and free), a pool that is too small, files that cannot be made, no memory.
    pub fn new(folder: &Path, lens: &[usize], arrays: usize, settings: &FileSettings) -> Result<Self> {
        Self::on(Arc::new(System), folder, lens, arrays, settings)
    }

    /// What such a tier holds, as long as no span lies in several pages.
    ///
    /// # Errors
    /// A pool that is too small.
    pub fn needs(lens: &[usize], arrays: usize, settings: &FileSettings) -> Result<TierBytes> {
        let (shapes, page, pages) = pages(lens, arrays, settings)?;
        let host = pages as u64 * Memory::size_of(page) + Memory::size_of(BLOCK);
        Ok(TierBytes { host, file: shapes.iter().map(Shape::file_bytes).sum() })
    }

    fn on(disk: Arc<dyn Disk>, parent: &Path, lens: &[usize], arrays: usize, settings: &FileSettings) -> Result<Self> {
        let (shapes, page, pages) = pages(lens, arrays, settings)?;
        let own = Folder::create(parent)?;
        let mut notes = Vec::new();
        let removed = folder::remove_stale(parent)?;
        if removed > 0 {
            notes.push(format!("{removed} folder(s) that earlier runs left in {} were removed", parent.display()));
        }
        let stores = open::stores(disk.as_ref(), parent, &own, &shapes, settings.direct, &mut notes)?;
        let pool = (0..pages).map(|_| Memory::new(page)).collect::<Result<Vec<_>>>()?;
        let block = Memory::new(BLOCK)?;
        let bytes = TierBytes {
            host: pool.iter().map(Memory::size).sum::<u64>() + block.size(),
            file: shapes.iter().map(Shape::file_bytes).sum(),
        };
        let workers = Workers::start(&disk, settings.threads, &settings.cores)?;
        let cache = Cache::new(stores, pool, workers);
        Ok(Self { cache, announced: VecDeque::new(), scratch: None, block, bytes, notes, disk, _folder: own })
    }

    /// What a person should know: whether direct IO is used, whether room is reserved, what was removed.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The pages of the announced spans in their order, as many as there is memory for.
    fn soon(&self) -> Vec<Page> {
        let mut soon = Vec::new();
        for span in &self.announced {
            for page in self.pages(span) {
                if soon.len() == self.cache.capacity() {
                    return soon;
                }
                if !soon.contains(&page) {
                    soon.push(page);
                }
            }
        }
        soon
    }

    fn pages(&self, span: &Span) -> impl Iterator<Item = Page> + use<> {
        let buffer = span.buffer;
        self.cache.stores()[buffer].shape.touched(&span.range).map(move |page| Page { buffer, page })
    }

    /// That `span` lies in its buffer and fits into memory.
    fn check(&self, span: &Span) -> Result<()> {
        inside(span, self.cache.stores().iter().map(|store| store.shape.len))?;
        let (pages, capacity) = (self.pages(span).count(), self.cache.capacity());
        if pages > capacity {
            return Err(Error::Engine(format!(
                "expected spans that fit into the {capacity} pages in memory, found {:?} of buffer {}, which lies in \
                 {pages}; say the largest span when the tier is made",
                span.range, span.buffer
            )));
        }
        Ok(())
    }

    /// Calls `f` with the part of `span` that lies in its only page.
    fn in_place(&mut self, page: Page, span: &Span, f: &mut dyn FnMut(&mut [&mut [f32]]) -> Result<()>) -> Result<()> {
        let shape = self.cache.stores()[page.buffer].shape;
        let (part, _) = shape.part(page.page, &span.range);
        let arrays = self.cache.change(page)?.floats()?.chunks_exact_mut(shape.page_len(page.page));
        let mut slices: Vec<&mut [f32]> = arrays.take(shape.arrays).map(|array| &mut array[part.clone()]).collect();
        f(&mut slices)
    }

    /// Calls `f` with a copy of `span`, and copies back.
    fn by_copy(
        &mut self,
        pages: &[Page],
        span: &Span,
        f: &mut dyn FnMut(&mut [&mut [f32]]) -> Result<()>,
    ) -> Result<()> {
        let (shape, len) = (self.cache.stores()[span.buffer].shape, span.range.len());
        let bytes = shape.arrays * len * size_of::<f32>();
        if self.scratch.as_ref().is_none_or(|scratch| scratch.size() < bytes as u64 + BLOCK as u64) {
            self.scratch = None;
            self.scratch = Some(Memory::new(bytes)?);
        }
        let scratch = self.scratch.as_mut().expect("made just now").floats()?;
        let mut outcome = Ok(());
        for back in [false, true] {
            for &page in pages {
                let (part, of_span) = shape.part(page.page, &span.range);
                let memory = self.cache.change(page)?.floats()?.chunks_exact_mut(shape.page_len(page.page));
                for (array, copy) in memory.zip(scratch.chunks_exact_mut(len)).take(shape.arrays) {
                    let (array, copy) = (&mut array[part.clone()], &mut copy[of_span.clone()]);
                    if back { array.copy_from_slice(copy) } else { copy.copy_from_slice(array) }
                }
            }
            if !back {
                let mut slices: Vec<&mut [f32]> = scratch.chunks_exact_mut(len).take(shape.arrays).collect();
                outcome = f(&mut slices);
            }
        }
        outcome
    }
}

impl Tier for FileTier {
    fn announce(&mut self, spans: &[Span]) -> Result<()> {
        self.cache.check()?;
        spans.iter().try_for_each(|span| self.check(span))?;
        self.announced = spans.iter().cloned().collect();
        let soon = self.soon();
        self.cache.write_behind(&soon)?;
        self.cache.read_ahead(&[], &soon)
    }

    fn with(&mut self, span: &Span, f: &mut dyn FnMut(&mut [&mut [f32]]) -> Result<()>) -> Result<()> {
        self.cache.check()?;
        self.check(span)?;
        if let Some(index) = self.announced.iter().position(|next| next == span) {
            self.announced.remove(index);
        }
        let pages: Vec<Page> = self.pages(span).collect();
        let soon = self.soon();
        self.cache.load(&pages, &soon)?;
        match pages[..] {
            [] => {
                let arrays = self.cache.stores()[span.buffer].shape.arrays;
                let mut empty: Vec<&mut [f32]> = (0..arrays).map(|_| Default::default()).collect();
                return f(&mut empty);
            }
            [page] => self.in_place(page, span, f)?,
            _ => self.by_copy(&pages, span, f)?,
        }
        self.cache.write_behind(&soon)?;
        self.cache.read_ahead(&[], &soon)
    }

    fn flush(&mut self) -> Result<()> {
        self.cache.check()?;
        self.cache.flush()?;
        for (buffer, store) in self.cache.stores().iter().enumerate() {
            open::verify(self.disk.as_ref(), store, buffer, &mut self.block)?;
        }
        Ok(())
    }

    fn bytes(&self) -> TierBytes {
        let scratch = self.scratch.as_ref().map_or(0, Memory::size);
        TierBytes { host: self.bytes.host + scratch, ..self.bytes }
    }
}

impl fmt::Debug for FileTier {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("FileTier")
            .field("bytes", &self.bytes())
            .field("notes", &self.notes)
            .finish_non_exhaustive()
    }
}

/// The buffers' places, the bytes of the largest page, and how many pages the pool holds.
fn pages(lens: &[usize], arrays: usize, settings: &FileSettings) -> Result<(Vec<Shape>, usize, usize)> {
    let shapes: Vec<Shape> = lens.iter().map(|&len| Shape::new(len, arrays, settings.largest_span)).collect();
    let page = shapes.iter().map(Shape::largest_page_bytes).max().unwrap_or(0);
    let pages = pool_pages(&shapes, page, settings)?;
    Ok((shapes, page, pages))
}

/// How many pages the pool holds.
fn pool_pages(shapes: &[Shape], page: usize, settings: &FileSettings) -> Result<usize> {
    let of_span =
        shapes.iter().map(|shape| shape.most_touched(settings.largest_span.min(shape.len))).max().unwrap_or(0);
    let all: usize = shapes.iter().map(Shape::pages).sum();
    let needed = (of_span + 1).min(all);
    let Some(pool) = settings.pool else { return Ok((2 * of_span + 2).min(all)) };
    let pages = usize::try_from(pool).unwrap_or(usize::MAX).checked_div(page).unwrap_or(0).min(all);
    if pages < needed {
        return Err(Error::Config(format!(
            "the pool for states in files: expected at least {} ({needed} pages for spans of up to {} elements), found {}",
            ByteSize((needed * page) as u64),
            settings.largest_span,
            ByteSize(pool)
        )));
    }
    Ok(pages)
}

#[cfg(test)]
mod tests;
