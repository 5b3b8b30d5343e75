// What scrolls takes the focus, so that the arrow keys scroll it; the theme's search gets a name.
document$.subscribe(() => {
  const observer = new ResizeObserver((sized) => {
    for (const { target } of sized) target.tabIndex = target.scrollWidth > target.clientWidth ? 0 : -1
  })
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, pre > code")) observer.observe(box)
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search")
})
