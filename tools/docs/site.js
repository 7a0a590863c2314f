// Colours, the menu of small screens, and the search, whose index is loaded when somebody begins to type
const root = document.documentElement
const base = document.currentScript.dataset.base

function setTheme(theme) {
  root.dataset.theme = theme
  try { localStorage.theme = theme } catch { /* private window */ }
}
try { if (localStorage.theme) root.dataset.theme = localStorage.theme } catch { /* private window */ }

addEventListener('DOMContentLoaded', () => {
  const preferred = () => matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'
  const isDark = () => (root.dataset.theme || preferred()) === 'dark'
  document.getElementById('theme').onclick = () => setTheme(isDark() ? 'light' : 'dark')
  const menu = document.getElementById('menu')
  menu.onclick = () => menu.setAttribute('aria-expanded', document.body.classList.toggle('with-menu'))
  const here = document.querySelector('nav.pages [aria-current]')
  if (here) here.closest('nav').scrollTop = here.offsetTop - innerHeight / 3

  const input = document.getElementById('query')
  const list = document.getElementById('found')
  let index = null
  const load = () => index || (index = new Promise(done => {
    const script = document.createElement('script')
    script.src = base + 'search.js'
    script.onload = () => done(window.SEARCH)
    document.head.append(script)
  }))

  // A section counts by where the words stand: its title most, then the page's, then its text
  function score(entry, words) {
    const [page, title, , text] = entry.map(x => x.toLowerCase())
    let sum = 0
    for (const word of words) {
      const found = (title === word ? 60 : 0) + (title.includes(word) ? 20 : 0) + (page.includes(word) ? 8 : 0)
        + (text.includes(word) ? 2 : 0)
      if (!found) return 0
      sum += found
    }
    return sum
  }
  async function search() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean)
    const entries = words.length ? await load() : []
    const best = entries.map(e => [score(e, words), e]).filter(([s]) => s).sort((a, b) => b[0] - a[0]).slice(0, 12)
    list.replaceChildren(...best.map(([, [page, title, url, text]]) => {
      const item = document.createElement('li')
      const link = document.createElement('a')
      const about = document.createElement('small')
      link.href = base + url
      link.textContent = title === page ? title : `${page} › ${title}`
      about.textContent = text.slice(0, 120)
      link.append(about)
      item.append(link)
      return item
    }))
    if (words.length && !best.length) {
      const item = document.createElement('li')
      item.innerHTML = '<a>Nothing has all of these words.</a>'
      list.append(item)
    }
  }
  input.oninput = search
  input.onfocus = load
  addEventListener('keydown', e => {
    if (e.key === '/' && document.activeElement !== input) { e.preventDefault(); input.focus() }
    if (e.key === 'Escape') { input.value = ''; list.replaceChildren() }
  })
})
